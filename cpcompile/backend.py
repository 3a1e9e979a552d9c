"""The backend that torch.compile(model, backend="cp") calls with each Dynamo graph."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.fx as fx
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import RestartAnalysis
from torch.distributed.tensor import Partial

import cpcompile.ops  # noqa: F401  (DTensor attention must work while Dynamo traces)
from cpcompile import (
    argmax_tracing,
    config,
    mended_rules,
    strided_shard,
    symbolic_tracing,
    tracing,
)
from cpcompile.agreement import check_agreement
from cpcompile.arguments import Frame, named_inputs
from cpcompile.description import describe
from cpcompile.errors import DropoutUnsupported, InputRejected, RingNotOverlapped
from cpcompile.inference import infer_inputs
from cpcompile.inputs import (
    classify_inputs,
    find_mesh,
    given_layout,
    specialize_sizes,
    symbolic_length,
)
from cpcompile.layout import leaves_ranks_empty
from cpcompile.lengths import expected
from cpcompile.logs import warn_once
from cpcompile.machine import agreed_profile
from cpcompile.ops.local_part import local_part
from cpcompile.options import Options, parse_options
from cpcompile.passes.context import Context, GraphInput, InputKind
from cpcompile.passes.find_attention import find_attention
from cpcompile.passes.gather_graph import gather_graph
from cpcompile.passes.graph import fake_value
from cpcompile.passes.pipeline import PassRun, run_passes
from cpcompile.report import GraphReport, record
from cpcompile.shardings import check_process_group, factors

log = logging.getLogger(__name__)

argmax_tracing.install()
mended_rules.install()
strided_shard.install()
symbolic_tracing.install()
tracing.install()  # before Dynamo traces, which is before any backend is called

Compiled = Callable[..., Any]

# The names in `shard` that were found, per options dict: Dynamo hands the same dict to
# every graph of one compiled function. It is kept here, so that its id stays its own.
_known_names: dict[int, tuple[object, set[str]]] = {}


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
    with tracing.backend_runs():
        return _compile(gm, example_inputs, options, mode)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: dict[str, Any] | None,
    mode: str | None,
) -> Compiled:
    parsed = parse_options(options)
    check_process_group()
    frame = Frame.current()
    _, known = _known_names.setdefault(id(options), (options, set()))
    found = find_mesh(gm.graph, parsed, frame)
    if found is None:  # a part of a function, around a graph break: nothing is sharded
        return _compile_inner(gm, list(example_inputs), parsed, mode)
    mesh, axis = found
    named = named_inputs(gm.graph, parsed.shard, frame, known)
    if not parsed.shard or frame.is_part:
        named = infer_inputs(gm.graph, frame, mesh, axis) | named
    length = symbolic_length(gm.graph, named, mesh, axis)
    specialize_sizes(gm.graph, length)
    description = describe(gm.graph, parsed, named, frame)
    check_agreement(mesh.get_group(axis), description)
    profile = agreed_profile(mesh, axis)
    degrees = factors(parsed.mesh or mesh._get_root_mesh(), parsed.axis)
    untouched = copy.deepcopy(gm) if length is not None or not parsed.strict else None

    def context(module: fx.GraphModule, length: torch.SymInt | None = None) -> Context:
        inputs = classify_inputs(module.graph, named, parsed, frame)
        return Context(
            mesh=mesh,
            axis=axis,
            inputs=inputs,
            profile=profile,
            strategy=parsed.strategy,
            layout=given_layout(inputs, parsed),
            memory_budget=parsed.memory_budget,
            degrees=degrees,
            tie_fraction=config.tie_fraction,
            strict=parsed.strict,
            gather_outputs=parsed.gather_outputs,
            backward=torch.is_grad_enabled(),
            length=length,
        )

    def compile_sharded(
        module: fx.GraphModule, length: torch.SymInt | None = None
    ) -> Compiled:
        ctx = context(module, length)
        runs = run_passes(module, ctx)
        return _finish(module, example_inputs, ctx, parsed, mode, frame, runs)

    if length is not None:
        assert untouched is not None
        compiled = symbolic_tracing.attempt(
            lambda: compile_sharded(gm, length),
            length,
            mesh.get_group(axis),
            frame.name,
            _FOR_THE_USER,
        )
        if compiled is not None:
            return compiled
        gm = untouched
        specialize_sizes(gm.graph)
        untouched = None if parsed.strict else copy.deepcopy(gm)
    try:
        return compile_sharded(gm)
    except Exception as error:  # a refusal of ours, or what torch cannot compile
        if isinstance(error, _FOR_THE_USER):
            raise
        if untouched is None:
            error.add_note(_STRICT_NOTE)
            raise
        warn_once(f"{frame.name} runs unsharded on every rank: {error}")
        ctx = context(untouched)
        find_attention(untouched.graph, ctx)
        ctx.calls = [dataclasses.replace(c, obstacle=str(error)) for c in ctx.calls]
        gather_graph(untouched.graph, ctx)
        untouched.recompile()
    return _finish(untouched, example_inputs, ctx, parsed, mode, frame, ())


# What no other way of compilation mends; Dynamo restarts itself for reasons of its own.
_FOR_THE_USER = (InputRejected, DropoutUnsupported, RingNotOverlapped, RestartAnalysis)

_STRICT_NOTE = (
    "cpcompile: options={'strict': False} runs what cannot be sharded unsharded instead"
)


def _finish(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ctx: Context,
    options: Options,
    mode: str | None,
    frame: Frame,
    runs: tuple[PassRun, ...],
) -> Compiled:
    """Compile the rewritten graph and put DTensors at its edges.

    Inside of the graph everything begins and ends with plain local tensors; DTensor
    inputs are unwrapped and results wrapped outside of it, by differentiable calls. So
    AOTAutograd sees no tensor subclass at the graph's edges.
    """
    inputs, outputs, mesh = tuple(ctx.inputs.items()), ctx.outputs, ctx.mesh
    local_inputs = [
        _local_example(node) if given.kind is InputKind.DTENSOR else example
        for (node, given), example in zip(inputs, example_inputs, strict=True)
    ]
    kinds = tuple(given for _, given in inputs)
    compiled = _compile_inner(gm, local_inputs, _inner_for(ctx, options), mode)
    report = GraphReport.of(ctx, runs, frame.name)
    log.info("%s", "; ".join([report.summary(), *report.sharded_inputs()]))
    _warn_if_nothing_is_sharded(ctx, report)
    _warn_about_break(gm, ctx, report)

    def run(*args: Any) -> tuple[Any, ...]:
        record(report)
        results = compiled(*map(_unwrap, args, kinds))
        return tuple(
            result if placement is None else placement.wrap(result, mesh)
            for result, placement in zip(results, outputs, strict=True)
        )

    return run


def _inner_for(ctx: Context, options: Options) -> Options:
    """Inductor drops calls whose results are empty, and with them their collectives.

    So where a rank holds no token at all, every rank runs without it; such sequences
    are shorter than the square of the number of ranks.
    """
    lengths = map(expected, ctx.sequence_lengths())
    empty = [n for n in lengths if leaves_ranks_empty(n, ctx.ranks)]
    if not empty or options.inner != "inductor":
        return options
    warn_once(
        f"a sequence of {min(empty)} tokens leaves some of {ctx.ranks} ranks without "
        "any: it is compiled with inner='aot_eager'"
    )
    return dataclasses.replace(options, inner="aot_eager")


def _unwrap(x: Any, given: GraphInput) -> Any:
    if given.kind is not InputKind.DTENSOR:
        return x
    if given.reduced:
        return local_part(x)
    return x.to_local(grad_placements=[Partial()] * len(given.placements))


def _local_example(node: fx.Node) -> Tensor:
    local: Tensor = fake_value(node)
    return local.detach().requires_grad_(local.requires_grad)


def _compile_inner(
    gm: fx.GraphModule, inputs: list[Any], options: Options, mode: str | None
) -> Compiled:
    # AOTAutograd's cache reads the graph's text; our calls hold a mesh it cannot see.
    with (
        tracing.plain_means_replicated(),
        # The backward is compiled here and now, under these settings, not when it runs.
        functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
    ):
        if options.inner == "aot_eager":
            return lookup_backend("aot_eager")(gm, inputs)
        from cpcompile.inductor import compile_local  # Inductor is slow to import

        return compile_local(gm, inputs, options.unroll, mode)


def _warn_if_nothing_is_sharded(ctx: Context, report: GraphReport) -> None:
    """Say that attention alone is shared out, because no input is."""
    kinds = {given.kind for given in ctx.inputs.values()}
    sharded = kinds & {InputKind.FULL, InputKind.DTENSOR} or ctx.began
    if sharded or not ctx.plans:
        return
    warn_once(
        f"{report.frame}: no input could be inferred to carry the sequence of its "
        f"{len(ctx.plans)} attention calls, so that only these are shared out, and "
        'all else runs on every rank; name it in options={"shard": {"argument": dim}}'
    )


def _warn_about_break(gm: fx.GraphModule, ctx: Context, report: GraphReport) -> None:
    """Say where the user's function breaks, and what that costs."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not report.distributed_calls:
        return
    places = [f"{f.filename}:{f.lineno}" for f in reason.user_stack]
    if ctx.gathered:
        cost = f"gathered there on every rank: {', '.join(ctx.gathered)}"
    elif any(placement is not None for placement in ctx.outputs):
        cost = "values cross it as DTensors"
    else:
        cost = "nothing large is gathered there"
    warn_once(
        f"graph break in {report.frame} at {places[-1] if places else 'unknown line'} "
        f"({reason.reason.strip().splitlines()[0]}); {cost}. Results stay correct; "
        "remove the break to keep everything sharded"
    )
