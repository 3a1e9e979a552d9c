"""The program of one tile, and its calls for all tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.passes.graph.subgraph_calls import call_subgraph
from cpcompile.passes.tiling.axes import SUM, Axis, Sum, value_of
from cpcompile.passes.tiling.regions import Region

aten = torch.ops.aten

# Calls that name the sizes of their result, and where.
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SIZES: dict[Any, int] = {
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.full.default: 0,
}
_NARROW = (torch.float16, torch.bfloat16)  # whose sums are held in float32
_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", "recompute", "ac_graph_id")


@dataclass(frozen=True)
class Part:
    """Calls of a region that run together.

    nodes: in order. outputs: those of them that others read. gradient: a number among
    the operands for which tiles take 1, because what depends on it, `scaled`, is
    multiplied by it afterwards.
    """

    region: Region
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    gradient: fx.Node | None = None
    scaled: frozenset[fx.Node] = frozenset()

    @property
    def inputs(self) -> list[fx.Node]:
        """Operands from outside."""
        return [x for x in self.region.inputs(self.nodes) if x is not self.gradient]

    def axis(self, node: fx.Node) -> Axis | None:
        """Of an operand; None if every tile reads all of it."""
        return self.region.axes.get(node)

    def result(self, node: fx.Node) -> Axis | Sum | None:
        """Of a call; None for a number that every tile computes."""
        return self.region.nodes.get(node)


def insert_tiles(part: Part, tile: int, name: str, before: fx.Node) -> list[fx.Node]:
    """Call the part for `tile` tokens at a time; returns what its outputs are now.

    name: of the submodule that runs one tile. A last, shorter tile has its own.
    """
    graph = before.graph
    owner = graph.owning_module
    assert owner is not None, "a joint graph belongs to a module"
    n = part.region.tokens
    sums = [x for x in part.outputs if part.result(x) is SUM]
    maker = _Maker(graph, part)
    with graph.inserting_before(before):
        cut = [maker.unflattened(x) for x in part.inputs]
        totals = [maker.zeros(x) for x in sums]
        pieces: dict[fx.Node, list[fx.Node]] = {x: [] for x in part.outputs}
        bodies: dict[int, fx.Node] = {}
        for start in range(0, n, tile):
            size = min(tile, n - start)
            if size not in bodies:
                attribute = name if size == tile else f"{name}_last"
                setattr(owner, attribute, body_of(part, size))
                bodies[size] = graph.get_attr(attribute)
            operands = [
                maker.tile_of(x, given, start, size)
                for x, given in zip(part.inputs, cut, strict=True)
            ]
            found = call_subgraph(bodies[size], operands + totals, maker.meta)
            results = dict(zip(part.outputs, found, strict=True))
            totals = [results[x] for x in sums]
            for x, result in results.items():
                pieces[x].append(result)
        return [maker.scaled(x, maker.joined(x, pieces[x])) for x in part.outputs]


class _Maker:
    """Puts calls into a graph, with their fake values."""

    def __init__(self, graph: fx.Graph, part: Part) -> None:
        self.graph = graph
        self.part = part
        like = part.nodes[-1].meta
        self.meta = {key: like[key] for key in _INHERITED if key in like}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.meta, original_aten=target)
        values = fx.node.map_arg((args, kwargs), value_of)
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def zeros(self, node: fx.Node) -> fx.Node:
        """Where a sum begins."""
        value = value_of(node)
        where = {"dtype": _dtype(value), "device": value.device}
        return self.call(aten.full.default, list(value.shape), 0, **where)

    def unflattened(self, node: fx.Node) -> fx.Node:
        """With the tokens in a dimension of their own."""
        axis, value = self.part.axis(node), value_of(node)
        if axis is None or axis.size(1) == 1:
            return node
        sizes = list(value.shape)
        sizes[axis.dim : axis.dim + 1] = [
            axis.outer,
            self.part.region.tokens,
            axis.inner,
        ]
        return self.call(aten.reshape.default, node, sizes)

    def tile_of(self, node: fx.Node, given: fx.Node, start: int, size: int) -> fx.Node:
        """Some tokens of an operand; `given` is what `unflattened` made of it."""
        axis = self.part.axis(node)
        if axis is None:
            return given
        dim = axis.dim + (0 if given is node else 1)
        piece = self.call(aten.slice.Tensor, given, dim, start, start + size)
        if given is node:
            return piece
        return self.call(
            aten.reshape.default, piece, _sizes(value_of(node), axis, size)
        )

    def joined(self, node: fx.Node, pieces: list[fx.Node]) -> fx.Node:
        """The value of an output from what the tiles gave."""
        axis, value = self.part.result(node), value_of(node)
        if not isinstance(axis, Axis):
            total = pieces[-1]
            if value.dtype in _NARROW:
                total = self.call(aten._to_copy.default, total, dtype=value.dtype)
            return total
        if axis.size(1) == 1:
            return self.call(aten.cat.default, pieces, axis.dim)
        split = []
        for piece in pieces:
            sizes = list(value_of(piece).shape)
            n = sizes[axis.dim] // axis.size(1)
            sizes[axis.dim : axis.dim + 1] = [axis.outer, n, axis.inner]
            split.append(self.call(aten.reshape.default, piece, sizes))
        whole = self.call(aten.cat.default, split, axis.dim + 1)
        return self.call(aten.reshape.default, whole, list(value.shape))

    def scaled(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Times the gradient for which tiles have taken 1, if it depends on it."""
        gradient = self.part.gradient
        if gradient is None or node not in self.part.scaled:
            return result
        number = gradient
        if value_of(gradient).dim() > 0:
            number = self.call(aten.reshape.default, gradient, [])
        return self.call(aten.mul.Tensor, result, number)


def body_of(part: Part, size: int) -> fx.GraphModule:
    """The calls of a part for `size` tokens, and the sums so far as last inputs."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(part.inputs):
        axis, value = part.axis(node), value_of(node)
        if axis is not None:
            value = value.new_empty(_sizes(value, axis, size))
        copies[node] = _placeholder(graph, f"operand_{i}", value)
    sums = [x for x in part.outputs if part.result(x) is SUM]
    totals = {}
    for i, node in enumerate(sums):
        value = value_of(node)
        value = value.new_empty(value.shape, dtype=_dtype(value))
        totals[node] = _placeholder(graph, f"sum_{i}", value)
    if part.gradient is not None:
        value = value_of(part.gradient)
        copies[part.gradient] = copied(
            graph,
            aten.full.default,
            (list(value.shape), 1.0),
            {"dtype": value.dtype, "device": value.device},
        )
    for node in part.nodes:
        copies[node] = for_tokens(graph, node, copies, part.result(node), size)
    results = []
    for node in part.outputs:
        made = copies[node]
        if node in totals:
            made = _added(graph, totals[node], made)
        results.append(made)
    graph.output(tuple(results))
    graph.lint()
    return fx.GraphModule({}, graph, "Tile")


def for_tokens(
    graph: fx.Graph,
    node: fx.Node,
    operands: Mapping[fx.Node, fx.Node],
    axis: Axis | Sum | None,
    size: int,
) -> fx.Node:
    """The same call for `size` tokens; axis: of its result."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    target: Any = node.target
    if target in _VIEWS:  # of a tile, which is a view itself
        target = aten.reshape.default
    if target in _SIZES and isinstance(axis, Axis):
        at = _SIZES[target]
        args = (*args[:at], _sizes(value_of(node), axis, size), *args[at + 1 :])
    return copied(graph, target, args, kwargs, node)


def _added(graph: fx.Graph, total: fx.Node, made: fx.Node) -> fx.Node:
    """What a tile gives, added to a sum; a product in the same call."""
    same = value_of(made).dtype == value_of(total).dtype
    if made.target is aten.mm.default and same and not made.users:
        product = (total, *made.args)
        graph.erase_node(made)
        return copied(graph, aten.addmm.default, product, {})
    return copied(graph, aten.add.Tensor, (total, made), {})


def _placeholder(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = value
    return node


def copied(
    graph: fx.Graph,
    target: Any,
    args: Any,
    kwargs: Any,
    like: fx.Node | None = None,
) -> fx.Node:
    """A new call with its fake value, and the origin of `like`."""
    node = graph.call_function(target, tuple(args), dict(kwargs))
    if like is not None:
        node.meta.update({k: v for k, v in like.meta.items() if k in _OF_CALL})
    values = fx.node.map_arg((tuple(args), dict(kwargs)), value_of)
    node.meta["val"] = target(*values[0], **values[1])
    node.meta.setdefault("original_aten", target)
    return node


_OF_CALL = ("stack_trace", "nn_module_stack", "original_aten", "seq_nr")


def _sizes(value: Tensor, axis: Axis, size: int) -> list[int]:
    """The shape of a value for `size` tokens."""
    sizes = list(value.shape)
    sizes[axis.dim] = axis.size(size)
    return sizes


def _dtype(value: Tensor) -> torch.dtype:
    return torch.float32 if value.dtype in _NARROW else value.dtype
