"""Compile a rewritten graph, and put DTensors at its edges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.accounting.read import Accounting
from cpcompile.compile.warm_start import Compilation, compiled_or_loaded
from cpcompile.frontend.arguments import Frame
from cpcompile.frontend.inputs import (
    gathered_value,
    input_names,
    is_parameter,
    local_value,
    whole_example,
    write_back,
)
from cpcompile.frontend.rank_consistency.rank_check import rank_check
from cpcompile.frontend.reducers import GradientContracts, warn_of_late_gradients
from cpcompile.frontend.request import inner_for
from cpcompile.frontend.symbolic_sizes import example_of
from cpcompile.ops.comm.communication import span
from cpcompile.ops.dtensor.local_part import owned
from cpcompile.options import Options
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.passes.graph.nodes import fake_value, output_nodes
from cpcompile.passes.joint.saving.save_by_budget import saving_of, warn_of_budget
from cpcompile.passes.joint.tiling.tiling_options import tiling_of, warn_of_no_tiles
from cpcompile.passes.local.folding.folding_options import folding_of
from cpcompile.passes.model.masks.constant_buffers import freeze_buffers
from cpcompile.passes.pipeline import trace_plans
from cpcompile.passes.whole.edges import Edges
from cpcompile.progress import phase
from cpcompile.reporting.graph_report import GraphReport, record
from cpcompile.reporting.lost_parallelism import warn_about_losses
from cpcompile.reporting.step_trace import step_recorder
from cpcompile.settings import setting

log = logging.getLogger(__name__)

CompiledCallable = Callable[..., Any]


def assemble(
    gm: fx.GraphModule,
    ctx: Context,
    example_inputs: Sequence[Any],
    options: Options,
    frame: Frame,
    runs: tuple[PassRun, ...],
) -> tuple[CompiledCallable, dict[str, str]]:
    """Compile the rewritten graph and put DTensors at its edges.

    runs: of the passes; none where every rank runs the whole graph, on inputs that are
        gathered before it.

    Returns: the program, and what it exchanges, for the ranks to compare.

    The graph begins and ends with plain local tensors, so that AOTAutograd sees no
    tensor subclass; differentiable calls outside unwrap DTensors and wrap results.
    """
    inputs, outputs, mesh = tuple(ctx.inputs.items()), ctx.findings.outputs, ctx.mesh
    examples = [
        whole_example(node) if graph_input.has_local_part else example_of(node, example)
        for (node, graph_input), example in zip(inputs, example_inputs, strict=True)
    ]
    kinds = tuple(graph_input for _, graph_input in inputs)
    inner = inner_for(ctx, options)
    parameters = [i for i, (node, _) in enumerate(inputs) if is_parameter(node)]
    tiling = tiling_of(options, mesh.device_type, parameters)
    saving = saving_of(options, mesh.device_type, frame.name, ctx.all_gather_text)
    folding = folding_of(mesh.get_group(ctx.axis), f"compiles {frame.name}")
    accounting = Accounting(input_names(ctx, frame))
    edges, enter = None, gathered_value
    if runs:
        results = output_nodes(gm.graph)
        names = [getattr(x, "name", "") for x in results]
        edges = Edges(ctx, kinds, frozenset(parameters), names)
        tokens = {x.kind for x in kinds}
        if ctx.takes_dtensors and not (ctx.keeps_layout or InputKind.FULL in tokens):
            edges.plain = frozenset(
                i
                for i, x in enumerate(results)
                if not isinstance(fake_value(x), DTensor)
            )
        enter = local_value
    how = Compilation(
        inner, mesh.device_type, tiling, saving, folding, accounting, edges
    )
    program = compiled_or_loaded(gm, examples, how, ctx.all_gather_text)
    compiled = program.run
    trace_plans(ctx)
    phase("waits for the other ranks")
    report = GraphReport.of(
        ctx, runs, frame.name, tiling, saving, folding, accounting.accounts
    )
    log.info("%s", "; ".join([report.summary(), *report.edges()]))
    warn_about_losses(gm, ctx, report, frame.nested)
    warn_of_no_tiles(options, tiling, frame.name)
    warn_of_budget(saving)
    warn_of_late_gradients(ctx, frame.name)
    check = rank_check(ctx, frame, bool(runs))
    contracts = GradientContracts(ctx, options, frame)
    frozen = freeze_buffers(ctx, frame.code)
    places = [(i, frozen[node]) for i, (node, _) in enumerate(inputs) if node in frozen]

    kept = () if runs else [i for i, x in enumerate(kinds) if x.kind is InputKind.KEPT]

    def call(args: Sequence[Any]) -> Any:
        inside = [enter(x, kind) for x, kind in zip(args, kinds, strict=True)]
        results = compiled(*inside)
        for place in kept:
            write_back(args[place], inside[place])
        return results

    name, steps = f"forward of {frame.name}", None
    path = setting("profile")
    if path is not None:
        steps = step_recorder(path, mesh.get_group(ctx.axis))

    def run(*args: Any) -> tuple[Any, ...]:
        if steps is not None:
            steps.begins(report)
        for place, unchanged in places:
            unchanged.check(args[place])
        record(report)
        contracts.check(args)
        with span(name):
            results = check(lambda: call(args), args)
        wrapped = [
            result if placement is None else placement.wrap(result, mesh)
            for result, placement in zip(owned(results, args), outputs, strict=True)
        ]
        for later in ctx.findings.later_results if options.computes else ():
            placement, i = outputs[later.number], later.number
            assert placement is not None, f"{later.name} is a DTensor outside"
            wrapped[i] = later.run(wrapped[i], args, placement)
        return tuple(wrapped)

    return run, program.exchanges
