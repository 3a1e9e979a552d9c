"""Return what wide results are made of, and make them after the program.

    program: hidden -> linear -> loss         returns linear, loss
      ->
    program: hidden -> linear -> loss         returns hidden, loss
    later:   hidden -> linear                 returns linear

A loss runs in tiles if nothing else needs the logits. A model that returns them beside
the loss needs them as a whole, but not in the program: autograd would give it their
gradient too, as large, zeros where nobody uses them. So they are made from the hidden
states once more, outside, by the same calls on DTensors. Their gradient exists if
somebody uses it, and joins that of the loss at the hidden states and the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected, is_symbol
from cpcompile.options import GradSync
from cpcompile.torch_patches.missing_gradients import on_mesh
from cpcompile.torch_private.fake_tensors import is_traceable_wrapper_subclass

from ..flow.widening_product import WidenedValue
from ..graph.constant_arguments import MeshAxis
from ..graph.context import PARAMETERS, Context, InputKind, LaterResult
from ..graph.effects import is_in_place, written_memory
from ..graph.graph_pass import graph_pass
from ..graph.nodes import fake_value, output_nodes, reached, storage
from ..placement.placement_calls import cp_replicate
from .edges import share_of
from .program_outputs import is_gathered

_MOST_CALLS = 20  # that make a weight of parameters


@graph_pass(reads=("calls", "plans"), writes=("later_results",))
def leave_for_later(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite what the graph returns; return how many results."""
    later, written = ctx.findings.later_results, written_memory(graph) - {None}
    autocast = torch.amp.autocast_mode._enter_autocast
    if not ctx.backward or any(x.target is autocast for x in graph.nodes):
        return 0  # calls may run under another autocast than around the program
    results = [*output_nodes(graph)]
    for number, result in enumerate(results):
        found = _source(result, ctx)
        if found is None:
            continue
        source, widened = found
        if any(storage(x) in written for x in (source, *widened.calls)):
            continue  # it may be another value in the end
        program = _Program(ctx, source)
        if program.copies(widened.calls):
            name = f"{result.name} {list(fake_value(result).shape)}"
            finished, inputs = program.finished(result), tuple(program.inputs)
            later.append(LaterResult(number, finished, inputs, name))
            results[number] = source
    graph.output_node().args = (tuple(results),)
    return len(later)


def _source(result: fx.Node, ctx: Context) -> tuple[fx.Node, WidenedValue] | None:
    """Return what a result is made of; None if it leaves as it is."""
    value = fake_value(result)
    if not isinstance(value, Tensor) or not value.requires_grad or value.ndim < 3:
        return None
    if any(map(is_symbol, value.shape)) or not _is_read(result):
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
    name = f"{result.name} {list(value.shape)}"
    if not stays and is_gathered(name, value, ctx):
        return None
    return next(iter(widened.read)), widened


def _is_read(result: fx.Node) -> bool:
    """Tell whether another result is made of one, as a loss."""
    after = reached([result], lambda x: x.users)
    leave = [x for x in after if any(user.op == "output" for user in x.users)]
    return leave != [result]


class _Program:
    """Copies of calls of the graph, on DTensors: of the source and of parameters.

    inputs: which inputs of the graph it takes after the source.
    """

    def __init__(self, ctx: Context, source: fx.Node) -> None:
        self._ctx, self._places = ctx, {node: i for i, node in enumerate(ctx.inputs)}
        self.graph = fx.Graph()
        self._copies = {source: self.graph.placeholder("source")}
        self.inputs: list[int] = []

    def copies(self, calls: Collection[fx.Node]) -> bool:
        """Copy calls, and what else they read; False if that is no mere parameter."""
        read = [x for call in calls for x in call.all_input_nodes if x not in calls]
        weights: dict[fx.Node, None] = {}
        if not all(x in self._copies or self._follows(x, weights) for x in read):
            return False
        for node in weights:
            if node.op == "placeholder":
                self._copies[node] = self._entered(node)
                self.inputs.append(self._places[node])
        for node in (*weights, *calls):
            if node.op != "placeholder":
                copy = self.graph.node_copy(node, self._copies.__getitem__)
                copy.meta = {}
                self._copies[node] = copy
        return True

    def _entered(self, parameter: fx.Node) -> fx.Node:
        weight = self.graph.placeholder(parameter.name)
        axis = MeshAxis(self._ctx.mesh, self._ctx.axis)
        known = self._ctx.inputs[parameter]
        if known.kind is not InputKind.PARAMETER or known.gradient is GradSync.REDUCE:
            return self._call(cp_replicate, weight, axis)
        factor = self._ctx.ranks if known.gradient is GradSync.AVERAGE else 1
        return self._call(cp_unreduced, weight, axis, factor)

    def _call(self, call: Callable[..., Any], *args: Any) -> fx.Node:
        return self.graph.call_function(call, args)

    def _follows(self, node: fx.Node, found: dict[fx.Node, None]) -> bool:
        """Add a parameter, or calls that make a weight of some, in order."""
        if node in found:
            return True
        if node.op == "placeholder":
            found[node] = None
            is_plain = not is_traceable_wrapper_subclass(fake_value(node))
            return self._ctx.inputs[node].kind in PARAMETERS and is_plain
        is_ours = str(getattr(node.target, "__module__", "")).startswith("cpcompile")
        if (
            node.op not in ("call_function", "call_method")
            or is_ours
            or is_in_place(node)
            or not node.all_input_nodes
            or len(found) > _MOST_CALLS
        ):
            return False
        if not all(self._follows(x, found) for x in node.all_input_nodes):
            return False
        found[node] = None
        return True

    def finished(self, result: fx.Node) -> fx.Graph:
        self.graph.output(self._copies[result])
        self.graph.lint()
        return self.graph


def cp_unreduced(x: Tensor, cp_axis: MeshAxis, factor: int = 1) -> DTensor:
    """Make a plain tensor Replicate.

    Its gradient is `factor` times this rank's summand.
    """
    return _Unreduced.apply(x, cp_axis, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Unreduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp_axis: MeshAxis, factor: int) -> DTensor:
        ctx.set_materialize_grads(False)  # zeros would be a plain tensor
        ctx.mesh, ctx.factor = cp_axis.mesh, factor
        return cp_replicate(x, cp_axis)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None
        share = share_of(on_mesh(grad, ctx.mesh), ctx.factor)
        return share._local_tensor, None, None
