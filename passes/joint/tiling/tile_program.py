"""The program of one tile, and what leaves it: results, sums so far, operands.

    dW = mm(t(dlogits), h)   ->   tile: dlogits;   outside: dW += mm(t(dlogits), h)

A sum over tokens that is a product of matrices, such as the gradient of a weight, is
added up outside of the tile, where Inductor can do it in place. So it exists once, and
it begins with the first product, not with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.ops.traced_nodes import SHARE

from ...flow.dim_maps import SUM, TokenSum
from ...graph.nodes import value_of
from ...graph.sequence_tokens import TokenAxis
from .tile_regions import RegionPart, bytes_of, is_view

aten = torch.ops.aten

# Calls that name the sizes of their result, and where.
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_SIZES: dict[Any, int] = {
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.full.default: 0,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_full.default: 1,
}
NARROW = (torch.float16, torch.bfloat16)  # whose sums are held in float32


def body_of(part: RegionPart, leaving: Leaving, size: int) -> fx.GraphModule:
    """Return the calls of a part for `size` tokens as a module.

    Its inputs are the inputs of the part, the sums so far, and for each product a
    number of its sum so far. No call reads this number: it lets tiles run one after the
    other.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(part.inputs):
        axis, value = part.axis(node), value_of(node)
        if axis is not None:
            value = value.as_strided(sizes_of(value, axis, size), value.stride())
        copies[node] = _placeholder(graph, f"operand_{i}", value)
    totals = {}
    for i, node in enumerate(leaving.sums):
        value = value_of(node)
        value = value.new_empty(value.shape, dtype=dtype_of_sums(value))
        totals[node] = _placeholder(graph, f"sum_{i}", value)
    for i, node in enumerate(leaving.products):
        value = value_of(node)
        _placeholder(
            graph, f"added_{i}", value.new_empty((), dtype=dtype_of_sums(value))
        )
    if part.gradient is not None:
        value = value_of(part.gradient)
        copies[part.gradient] = copied(
            graph,
            aten.full.default,
            (list(value.shape), 1.0),
            {"dtype": value.dtype, "device": value.device},
        )
    for node in part.nodes:
        if node not in leaving.products:
            copies[node] = for_tokens(graph, node, copies, part.result(node), size)
    results = []
    for node in leaving.of_a_tile:
        tile_result = copies[node]
        if node in totals:
            tile_result = copied(
                graph, aten.add.Tensor, (totals[node], tile_result), {}
            )
        results.append(tile_result)
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule({}, graph, "Tile")


def for_tokens(
    graph: fx.Graph,
    node: fx.Node,
    operands: Mapping[fx.Node, fx.Node],
    axis: TokenAxis | TokenSum | None,
    size: int,
) -> fx.Node:
    """Copy a call for `size` tokens; axis: the axis of its result."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
    target: Any = node.target
    if target in _VIEWS:  # of a tile, which is a view itself
        target = aten.reshape.default
    if target in _SIZES and isinstance(axis, TokenAxis):
        at = _SIZES[target]
        args = (*args[:at], sizes_of(value_of(node), axis, size), *args[at + 1 :])
    return copied(graph, target, args, kwargs, node)


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
    """Insert a new call with its fake value, and with the origin of `like`."""
    node = graph.call_function(target, tuple(args), dict(kwargs))
    if like is not None:
        node.meta.update({k: v for k, v in like.meta.items() if k in _OF_CALL})
    values = fx.node.map_arg((tuple(args), dict(kwargs)), value_of)
    node.meta["val"] = target(*values[0], **values[1])
    node.meta.setdefault("original_aten", target)
    return node


_OF_CALL = ("stack_trace", "nn_module_stack", "original_aten", "seq_nr", SHARE)


def sizes_of(value: Tensor, axis: TokenAxis, size: int) -> list[int]:
    """Return the shape of a value for `size` tokens."""
    sizes = list(value.shape)
    sizes[axis.dim] = axis.size(size)
    return sizes


def dtype_of_sums(value: Tensor) -> torch.dtype:
    return torch.float32 if value.dtype in NARROW else value.dtype


@dataclass(frozen=True)
class Leaving:
    """The calls of a part whose values others need.

    results: values with tokens. sums: sums over tokens, to which every tile adds.
    products: sums that are made outside. operands: the operands of products, as far as
    a tile makes them. first: the smallest value that the forward needs, if gradients
    are computed in it too.
    """

    results: tuple[fx.Node, ...]
    sums: tuple[fx.Node, ...]
    products: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    first: fx.Node | None = None

    @classmethod
    def of(cls, part: RegionPart) -> Leaving:
        every = [x for x in part.outputs if part.result(x) is SUM]
        products = [x for x in every if _is_product(x, part)]
        results = [x for x in part.outputs if x not in every]
        bases = {
            base: None
            for x in products
            for y in x.all_input_nodes
            if (base := _base(y, part)) in part.nodes and base not in results
        }
        sums = tuple(x for x in every if x not in products)
        early = [x for x in part.outputs if x not in part.scaled]
        first = min(early, key=bytes_of, default=None)
        if part.gradient is None:
            first = None
        return cls(tuple(results), sums, tuple(products), tuple(bases), first)

    @property
    def of_a_tile(self) -> tuple[fx.Node, ...]:
        """Values that one call of a tile returns."""
        return (*self.results, *self.sums, *self.operands)


def _is_product(node: fx.Node, part: RegionPart) -> bool:
    if node.target is not aten.mm.default or len(node.all_input_nodes) != 2:
        return False
    return not any(user in part.nodes for user in node.users)


def _base(node: fx.Node, part: RegionPart) -> fx.Node:
    """Return the value that a value is a view of.

    A tile returns no views of its operands.
    """
    while node in part.nodes and len(node.all_input_nodes) == 1 and is_view(node):
        (node,) = node.all_input_nodes
    return node
