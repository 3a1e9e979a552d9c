"""The backend that torch.compile(model, backend="cp") calls with each Dynamo graph."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo import compiled_autograd

import cpcompile.ops  # noqa: F401  (DTensor attention must work while Dynamo traces)
from cpcompile.compile.assembly import Compiled, assemble
from cpcompile.compile.inner_compilers import compile_inner
from cpcompile.errors import (
    DropoutUnsupported,
    InputRejected,
    OptionRejected,
    RingNotOverlapped,
)
from cpcompile.frontend.arguments import Frame, module_buffers
from cpcompile.frontend.frame_chunks import run_with_room
from cpcompile.frontend.gc_threshold import collected_rarely
from cpcompile.frontend.inputs import classify_inputs, given_layout
from cpcompile.frontend.padding.pad_graph import pad_graph
from cpcompile.frontend.reducers import contracts_text
from cpcompile.frontend.request import Request, agreed_request
from cpcompile.frontend.retries import attempt_until_foreseen
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.logs import warn_once
from cpcompile.options import Options, parse_options
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.effects import enables_gradients
from cpcompile.passes.graph.sequence_tokens import Padding
from cpcompile.passes.model.attention.find_attention import find_attention
from cpcompile.passes.model.masks.constant_buffers import without_changing
from cpcompile.passes.model.sharding.gather_graph import gather_graph
from cpcompile.passes.model.sharding.program_outputs import gather_limit, keep_named
from cpcompile.passes.pipeline import run_passes
from cpcompile.passes.rewrites import Rewrite, replacements
from cpcompile.progress import compiling
from cpcompile.ranks import presence
from cpcompile.ranks.agreement import attempt, check_agreement, hear
from cpcompile.settings import setting
from cpcompile.torch_patches import (
    causal_detection,
    dead_collectives,
    graph_breaks,
    local_memory,
    mended_rules,
    missing_gradients,
    redistribute_plans,
    saved_values,
    shard_placements,
    skipped_frames,
    symbolic_tracing,
    symbols_in_dynamo,
    traced_handlers,
    tracing,
    whole_ddp_graphs,
)

causal_detection.install()
traced_handlers.install()
dead_collectives.install()
mended_rules.install()
missing_gradients.install()
saved_values.install()
skipped_frames.install()
graph_breaks.install()
shard_placements.install()
symbolic_tracing.install()
symbols_in_dynamo.install()
whole_ddp_graphs.install()
tracing.install()  # before Dynamo traces, which is before any backend is called

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
            if whole_ddp_graphs.is_piece(gm):
                _refuse_piece(frame, parsed := parse_options(options))
                return compile_inner(gm, list(example_inputs), parsed, mode)
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
        padding: Padding | None = None,
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
            whole_mask_share=setting("whole_mask_share"),
            strict=parsed.strict,
            gather_limit=gather_limit(module, parsed.gather_outputs),
            keeps_layout=parsed.view == "local",
            backward=torch.is_grad_enabled() or enables_gradients(module.graph),
            length=length,
            padding=padding,
            unforeseen=unforeseen or {},
            compare=lambda items: check_agreement(group, items, doing),
            hear=lambda text: hear(group, text, doing),
        )

    def compile_sharded(
        module: fx.GraphModule, ctx: Context, examples: Sequence[Any] = example_inputs
    ) -> tuple[Compiled, dict[str, str]]:
        with replacements(module) as replaced:
            runs = run_passes(module, ctx)
        rewrite = Rewrite(untouched, module, ctx, replaced)
        made, exchanges = assemble(rewrite, examples, parsed, mode, frame, runs)
        counts = ", ".join(f"{run.name} {run.rewrites}" for run in runs)
        alike = ctx.plan_texts() | {"rewrites": counts} | exchanges
        alike["gradients"] = contracts_text(ctx)
        return made, alike

    def compile_for_multiples(
        length: torch.SymInt,
    ) -> tuple[Compiled, dict[str, str], torch.SymInt]:
        return *compile_sharded(gm, context(gm, length)), length

    def compile_for_all(
        length: torch.SymInt,
    ) -> tuple[Compiled, dict[str, str], torch.SymInt]:
        module = copy.deepcopy(untouched)  # Dynamo reads the inputs of its own
        ranks, device = request.mesh.size(request.axis), request.mesh.device_type
        padding, around = pad_graph(module.graph, length, ranks, device)
        ctx = context(module, padding.symbol, padding)
        made, alike = compile_sharded(module, ctx, [*example_inputs, None, None])
        return around(made, ctx), alike, padding.symbol

    if length is not None:
        # What pad_tokens mends may be what torch cannot do with symbols.
        ways = [] if request.is_padded else [compile_for_multiples]
        compiled = symbolic_tracing.attempt(
            [partial(way, length) for way in (*ways, compile_for_all)],
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
        return compile_sharded(module, context(module, unforeseen=unforeseen))

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
        return (*assemble(rewrite, example_inputs, parsed, mode, frame, ()), "")

    tried = attempt(group, compile_unsharded, (Exception,), doing)
    if tried.problem is not None:  # some ranks would have Dynamo trace again
        raise tried.problem
    assert tried.made is not None, "an attempt has a result or a problem"
    return tried.made


def _refuse_piece(frame: Frame, options: Options) -> None:
    """Raise InputRejected for a piece of a graph, or, if not strict, warn."""
    text = (
        "a piece of a graph that DDPOptimizer has cut for DDP, because the backend is "
        'not "cp" itself; needed the whole: torch.compile(..., backend="cp"), or '
        "torch._dynamo.config.optimize_ddp = False"
    )
    if options.strict:
        raise InputRejected(f"{frame.name} is {text}")
    warn_once(f"{frame.name} runs unsharded on every rank: it is {text}")


# What no other way of compilation mends.
_FOR_THE_USER = (InputRejected, OptionRejected, DropoutUnsupported, RingNotOverlapped)

_STRICT_NOTE = (
    "cpcompile: options={'strict': False} runs what cannot be sharded unsharded instead"
)
