"""The backend that torch.compile(model, backend="cp") calls with each Dynamo graph."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo import compiled_autograd

import cpcompile.ops  # noqa: F401  (DTensor attention must work while Dynamo traces)
from cpcompile.errors import (
    DropoutUnsupported,
    InputRejected,
    OptionRejected,
    RingNotOverlapped,
)
from cpcompile.frontend.arguments import Frame, module_buffers
from cpcompile.frontend.compared.rank_check import rank_check
from cpcompile.frontend.garbage import collected_rarely
from cpcompile.frontend.inputs import (
    classify_inputs,
    given_layout,
    is_parameter,
    local_example,
    local_value,
)
from cpcompile.frontend.reducers import Contracts, contracts_text
from cpcompile.frontend.request import Request, agreed_request, inner_for
from cpcompile.frontend.retries import attempt_until_foreseen
from cpcompile.frontend.roomy_stack import run_with_room
from cpcompile.frontend.symbols import example_of, specialize_sizes
from cpcompile.inductor.inner_compilers import compile_inner
from cpcompile.logs import warn_once
from cpcompile.ops.comm.communication import span
from cpcompile.ops.dtensor.local_part import owned
from cpcompile.options import Options, parse_options
from cpcompile.passes.attention.constant_buffers import freeze_buffers, without_changing
from cpcompile.passes.attention.find_attention import find_attention
from cpcompile.passes.folding.request import folding_of
from cpcompile.passes.graph.context import Context, PassRun
from cpcompile.passes.graph.effects import enables_gradients
from cpcompile.passes.pipeline import run_passes
from cpcompile.passes.rewrites import Rewrite, replacements, watched
from cpcompile.passes.saving.request import saving_of, warn_of_budget
from cpcompile.passes.sharding import failing_call
from cpcompile.passes.sharding.gather_graph import gather_graph
from cpcompile.passes.sharding.results import gather_limit, keep_named
from cpcompile.passes.tiling.request import tiling_of, warn_of_no_tiles
from cpcompile.progress import compiling, phase
from cpcompile.ranks import presence
from cpcompile.ranks.agreement import attempt, check_agreement, hear
from cpcompile.reporting.lost_parallelism import warn_about_losses
from cpcompile.reporting.report import GraphReport, record
from cpcompile.reporting.tracing.recorder import step_recorder
from cpcompile.settings import setting
from cpcompile.torch_patches import (
    causal_detection,
    dead_collectives,
    local_memory,
    mended_rules,
    redistribute_plans,
    saved_values,
    shard_placements,
    skipped_frames,
    symbolic_tracing,
    symbols_in_dynamo,
    traced_handlers,
    tracing,
)
from cpcompile.warm_start.start import Compilation, compiled_or_loaded

log = logging.getLogger(__name__)

causal_detection.install()
traced_handlers.install()
dead_collectives.install()
mended_rules.install()
saved_values.install()
skipped_frames.install()
shard_placements.install()
symbolic_tracing.install()
symbols_in_dynamo.install()
tracing.install()  # before Dynamo traces, which is before any backend is called

Compiled = Callable[..., Any]

presence.announce()  # so that a rank that ends before it compiles anything is missed


def cp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one Dynamo graph for context parallelism.

    Args:
        gm: the graph, of the whole sequence.
        example_inputs: its inputs, fake or real.
        options: see `cpcompile.options.Options`.
        mode: handed to Inductor, as `torch.compile(mode=...)`.

    Raises: OptionRejected, InputRejected, RanksDisagree; CannotRewrite if strict.
    """
    if compiled_autograd.in_compiled_autograd_region:
        # The backward of what is compiled already: its tensors are local ones.
        return compile_inner(gm, list(example_inputs), parse_options(options), mode)
    with (
        collected_rarely(),
        tracing.backend_runs(),
        local_memory.copied_if_need_be(),
        redistribute_plans.plans_are_kept(),
        compiled_autograd._disable(),  # it would compile what passes try
    ):
        frame = Frame.current()
        with compiling(frame.name):
            request = agreed_request(gm.graph, options, frame)
            named = request.outputs
            spread = keep_named(gm, named) if named is not None else None
            compiled = run_with_room(
                lambda: _compile(gm, example_inputs, request, frame, mode)
            )
            return compiled if spread is None else lambda *x: spread(compiled(*x))


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    request: Request | Options,
    frame: Frame,
    mode: str | None,
) -> Compiled:
    if isinstance(request, Options):  # nothing is sharded
        return compile_inner(gm, list(example_inputs), request, mode)
    parsed, length, group = request.options, request.length, request.group
    doing = f"compiles {frame.name}"
    untouched = copy.deepcopy(gm)  # for another try

    def context(
        module: fx.GraphModule,
        length: torch.SymInt | None = None,
        unforeseen: dict[str, str] | None = None,
    ) -> Context:
        inputs = classify_inputs(
            module.graph, request.named, parsed, frame, request.mesh
        )
        return Context(
            mesh=request.mesh,
            axis=request.axis,
            inputs=inputs,
            buffers=without_changing(module_buffers(module.graph), frame.code),
            profile=request.profile,
            strategy=parsed.strategy,
            layout=given_layout(inputs, parsed),
            memory_budget=parsed.memory_budget,
            degrees=request.degrees,
            tie_fraction=setting("tie_fraction"),
            strict=parsed.strict,
            gather_limit=gather_limit(module, parsed.gather_outputs),
            keeps_layout=parsed.view == "local",
            backward=torch.is_grad_enabled() or enables_gradients(module.graph),
            length=length,
            unforeseen=unforeseen or {},
            compare=lambda items: check_agreement(group, items, doing),
            hear=lambda text: hear(group, text, doing),
        )

    def compile_sharded(
        module: fx.GraphModule,
        length: torch.SymInt | None = None,
        unforeseen: dict[str, str] | None = None,
    ) -> tuple[Compiled, dict[str, str]]:
        ctx = context(module, length, unforeseen)
        with replacements(module) as replaced:
            runs = run_passes(module, ctx)
        rewrite = Rewrite(untouched, module, ctx, replaced)
        made, exchanges = _finish(rewrite, example_inputs, parsed, mode, frame, runs)
        counts = ", ".join(f"{run.name} {run.rewrites}" for run in runs)
        alike = ctx.plan_texts() | {"rewrites": counts} | exchanges
        alike["gradients"] = contracts_text(ctx)
        return made, alike

    if length is not None:
        compiled = symbolic_tracing.attempt(
            lambda: compile_sharded(gm, length),
            length,
            group,
            frame.name,
            _FOR_THE_USER,
        )
        if compiled is not None:
            return compiled
        gm = untouched
        specialize_sizes(gm.graph)
        untouched = copy.deepcopy(gm)

    def compile_with(unforeseen: dict[str, str]) -> tuple[Compiled, dict[str, str]]:
        module = copy.deepcopy(untouched) if unforeseen else gm
        return compile_sharded(module, unforeseen=unforeseen)

    # a refusal of ours, or what torch cannot compile, on whichever rank
    tried = attempt_until_foreseen(group, compile_with, _FOR_THE_USER, doing)
    if tried.made is not None:
        return tried.made
    error = tried.problem
    assert error is not None, "an attempt has a result or a problem"
    if parsed.strict:
        error.add_note(_STRICT_NOTE)
        raise error
    warn_once(f"{frame.name} runs unsharded on every rank: {error}")

    def compile_unsharded() -> tuple[Compiled, dict[str, str], str]:
        ctx = context(untouched)
        find_attention(untouched.graph, ctx)
        ctx.calls = [dataclasses.replace(c, obstacle=str(error)) for c in ctx.calls]
        gather_graph(untouched.graph, ctx)
        untouched.recompile()
        rewrite = Rewrite(untouched, untouched, ctx, {})
        return (*_finish(rewrite, example_inputs, parsed, mode, frame, ()), "")

    tried = attempt(group, compile_unsharded, (Exception,), doing)
    if tried.problem is not None:  # some ranks would have Dynamo trace again
        raise tried.problem
    assert tried.made is not None, "an attempt has a result or a problem"
    return tried.made


# What no other way of compilation mends.
_FOR_THE_USER = (InputRejected, OptionRejected, DropoutUnsupported, RingNotOverlapped)

_STRICT_NOTE = (
    "cpcompile: options={'strict': False} runs what cannot be sharded unsharded instead"
)


def _finish(
    rewrite: Rewrite,
    example_inputs: Sequence[Any],
    options: Options,
    mode: str | None,
    frame: Frame,
    runs: tuple[PassRun, ...],
) -> tuple[Compiled, dict[str, str]]:
    """Compile the rewritten graph and put DTensors at its edges.

    Returns: the program, and what it exchanges, for the ranks to compare.

    The graph begins and ends with plain local tensors, so that AOTAutograd sees no
    tensor subclass; differentiable calls outside unwrap DTensors and wrap results.
    """
    gm, ctx = rewrite.rewritten, rewrite.ctx
    inputs, outputs, mesh = tuple(ctx.inputs.items()), ctx.outputs, ctx.mesh
    local_inputs = [
        local_example(node) if given.has_local_part else example_of(node, example)
        for (node, given), example in zip(inputs, example_inputs, strict=True)
    ]
    kinds = tuple(given for _, given in inputs)
    inner = inner_for(ctx, options)
    parameters = [i for i, (node, _) in enumerate(inputs) if is_parameter(node)]
    tiling = tiling_of(options, mesh.device_type, parameters)
    saving = saving_of(options, mesh.device_type, frame.name, ctx.hear)
    folding = folding_of(options, mesh.get_group(ctx.axis), f"compiles {frame.name}")
    how = Compilation(inner, mode, mesh.device_type, tiling, saving, folding)
    watch = watched(rewrite)
    with failing_call.named(gm, ctx, frame.name):
        program = compiled_or_loaded(gm, local_inputs, how, ctx.hear)
        compiled = watch(program.run)
    phase("waits for the other ranks")
    report = GraphReport.of(ctx, runs, frame.name, tiling, saving, folding)
    log.info("%s", "; ".join([report.summary(), *report.edges()]))
    warn_about_losses(gm, ctx, report, frame.nested)
    warn_of_no_tiles(options, tiling, frame.name)
    warn_of_budget(saving)
    check = rank_check(ctx, options, frame, bool(runs))
    contracts = Contracts(ctx, options, frame)
    frozen = freeze_buffers(ctx, frame.code)
    places = [(i, frozen[node]) for i, (node, _) in enumerate(inputs) if node in frozen]

    name, steps = f"forward of {frame.name}", None
    if options.profile is not None:
        steps = step_recorder(options.profile, mesh.get_group(ctx.axis))

    def run(*args: Any) -> tuple[Any, ...]:
        if steps is not None:
            steps.begins(report)
        for place, unchanged in places:
            unchanged.check(args[place])
        record(report)
        contracts.check(args)
        with span(name):
            results = check(lambda: compiled(*map(local_value, args, kinds)), args)
        return tuple(
            result if placement is None else placement.wrap(result, mesh)
            for result, placement in zip(owned(results, args), outputs, strict=True)
        )

    return run, program.exchanges
