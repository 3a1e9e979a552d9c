"""Return what wide results are made of, and make them after the program.

    program: hidden -> linear -> loss         returns linear, loss
      ->
    program: hidden -> linear -> loss         returns hidden, loss
    later:   hidden -> linear                 returns linear

See model/sharding/later_results.py, which says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import expected, is_symbol
from cpcompile.options import GradSync

from ..flow.widening_product import WidenedValue
from ..graph.constant_arguments import MeshAxis
from ..graph.context import Context, InputKind, LaterResult
from ..graph.effects import is_in_place
from ..graph.graph_pass import graph_pass
from ..graph.nodes import fake_value, output_nodes
from ..model.sharding.later_results import (
    LaterProgram,
    changes_autocast,
    is_read,
)
from ..model.sharding.program_outputs import is_gathered
from ..placement.placement_calls import cp_replicate, cp_unreduced


@graph_pass(reads=("calls", "plans"), writes=("later_results",))
def leave_for_later(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite what the graph returns; return how many results."""
    later = ctx.findings.later_results
    if not ctx.backward or changes_autocast(graph):
        return 0
    results = [*output_nodes(graph)]
    for number, result in enumerate(results):
        found = _source(result, ctx)
        if found is None:
            continue
        source, widened = found
        program = _Program(ctx, source)
        if program.copies(widened.calls):
            value = fake_value(result)
            name = f"{result.name} {list(value.shape)}"
            finished = program.finished(result)
            later.append(LaterResult(number, finished, program.inputs, name))
            results[number] = source
    graph.output_node().args = (tuple(results),)
    return len(later)


def _source(result: fx.Node, ctx: Context) -> tuple[fx.Node, WidenedValue] | None:
    """Return what a result is made of; None if it leaves as it is."""
    value = fake_value(result)
    if not isinstance(value, Tensor) or not value.requires_grad or value.ndim < 3:
        return None
    if any(map(is_symbol, value.shape)) or not is_read(result):
        return None
    if value.numel() * value.element_size() < ctx.later_bytes * ctx.ranks:
        return None
    lengths = {*map(expected, ctx.sequence_lengths())}
    dims = [dim for dim in range(1, value.ndim - 1) if value.shape[dim] in lengths]
    if not dims:
        return None
    widened = WidenedValue.of(result, dims[0], lambda x, _: not is_in_place(x))
    if widened is None or [*widened.read.values()] != dims[:1]:
        return None
    stays = ctx.takes_dtensors or ctx.keeps_layout
    if not stays and is_gathered(result, value, ctx):
        return None
    return next(iter(widened.read)), widened


class _Program(LaterProgram):
    """The calls on DTensors. ctx: of the program before it."""

    def __init__(self, ctx: Context, source: fx.Node) -> None:
        super().__init__(ctx, source)
        self._ctx = ctx
        self._known = {node.name: x for node, x in ctx.inputs.items()}

    def entered(self, weight: fx.Node) -> fx.Node:
        axis = MeshAxis(self._ctx.mesh, self._ctx.axis)
        known = self._known[str(weight.target)]
        if known.kind is not InputKind.PARAMETER or known.gradient is GradSync.REDUCE:
            return self._call(cp_replicate, weight, axis)
        average = known.gradient is GradSync.AVERAGE
        factor = self._ctx.ranks if average else 1
        return self._call(cp_unreduced, weight, axis, factor)

    def _call(self, call: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(call, args)
