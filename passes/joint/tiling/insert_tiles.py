"""Insert the calls of all tiles of a part, and make its outputs from their results."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

import cpcompile.ops.tile_sums  # noqa: F401  # registers its operators
from cpcompile.ops.traced_nodes import SHARE
from cpcompile.torch_private.operators import auto_functionalized_v2

from ...graph.nodes import memory_order, value_of
from ...graph.sequence_tokens import TokenAxis
from ...graph.subgraph_calls import call_subgraph
from .tile_program import NARROW, Leaving, body_of, dtype_of_sums, for_tokens, sizes_of
from .tile_regions import RegionPart

aten = torch.ops.aten

_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", "recompute", "ac_graph_id")


def insert_tiles(
    part: RegionPart, tile: int, name: str, before: fx.Node
) -> list[fx.Node]:
    """Call the part for `tile` tokens at a time; return what its outputs are now.

    name: the name of the submodule that runs one tile. A last, shorter tile has its
    own.
    """
    graph = before.graph
    owner = graph.owning_module
    assert owner is not None, "a joint graph belongs to a module"
    n = part.region.tokens
    leaving = Leaving.of(part)
    maker = _Maker(graph, part)
    with graph.inserting_before(before):
        cut = [maker.unflattened(x) for x in part.inputs]
        totals = [maker.zeros(x) for x in leaving.sums]
        products: dict[fx.Node, fx.Node] = {}
        added = [maker.zero_of(x) for x in leaving.products]
        pieces: dict[fx.Node, list[fx.Node]] = {x: [] for x in leaving.results}
        bodies: dict[int, fx.Node] = {}
        for start in range(0, n, tile):
            size = min(tile, n - start)
            if size not in bodies:
                attribute = name if size == tile else f"{name}_last"
                setattr(owner, attribute, body_of(part, leaving, size))
                bodies[size] = graph.get_attr(attribute)
            operands = [
                maker.tile_of(x, source, start, size)
                for x, source in zip(part.inputs, cut, strict=True)
            ]
            arguments = [*operands, *totals, *added]
            outputs = call_subgraph(bodies[size], arguments, maker.meta)
            results = dict(zip(leaving.of_a_tile, outputs, strict=True))
            totals = [results[x] for x in leaving.sums]
            for x in leaving.results:
                pieces[x].append(results[x])
            values = results | dict(zip(part.inputs, operands, strict=True))
            for x in leaving.products:
                a, b = (maker.viewed(y, values, size) for y in x.all_input_nodes)
                products[x] = maker.added(x, products.get(x), a, b)
            added = [maker.first_of(products[x]) for x in leaving.products]
        whole = {x: maker.joined(x, pieces[x]) for x in leaving.results}
        sums = products | dict(zip(leaving.sums, totals, strict=True))
        whole |= {x: maker.narrowed(x, total) for x, total in sums.items()}
        if (first := leaving.first) is not None and added:
            whole[first] = maker.call(torch.ops.cp.after.default, whole[first], added)
        return [maker.scaled(x, whole[x]) for x in part.outputs]


class _Maker:
    """A maker of calls in a graph, with their fake values."""

    def __init__(self, graph: fx.Graph, part: RegionPart) -> None:
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
        """Return the zeros with which a sum begins."""
        value = value_of(node)
        where = {"dtype": dtype_of_sums(value), "device": value.device}
        return self.call(aten.full.default, list(value.shape), 0, **where)

    def zero_of(self, node: fx.Node) -> fx.Node:
        """Return the zero that stands for `first_of` before there is a sum."""
        value = value_of(node)
        where = {"dtype": dtype_of_sums(value), "device": value.device}
        return self.call(aten.full.default, [], 0, **where)

    def first_of(self, total: fx.Node) -> fx.Node:
        """Take the first number of a sum; the next tile does not start without it."""
        row = self.call(aten.select.int, total, 0, 0)
        return self.call(aten.select.int, row, 0, 0)

    def unflattened(self, node: fx.Node) -> fx.Node:
        """Reshape a value so that its tokens are in a dimension of their own."""
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

    def tile_of(self, node: fx.Node, source: fx.Node, start: int, size: int) -> fx.Node:
        """Take some tokens of an operand; `source` is what `unflattened` made of it."""
        axis = self.part.axis(node)
        if axis is None:
            return source
        dim = axis.dim + (0 if source is node else 1)
        piece = self.call(aten.slice.Tensor, source, dim, start, start + size)
        if source is node:
            return piece
        return self.call(
            aten.reshape.default, piece, sizes_of(value_of(node), axis, size)
        )

    def joined(self, node: fx.Node, pieces: list[fx.Node]) -> fx.Node:
        """Join what the tiles gave as the value of an output."""
        axis, value = self.part.result(node), value_of(node)
        if not isinstance(axis, TokenAxis):
            return pieces[-1]  # a number that every tile computes
        if axis.size(1) == 1:
            order = memory_order(value)  # which views of it count on
            if order is None:
                return self.call(aten.cat.default, pieces, axis.dim)
            back = [order.index(dim) for dim in range(value.ndim)]
            parts = [self.call(aten.permute.default, x, [*order]) for x in pieces]
            whole = self.call(aten.cat.default, parts, back[axis.dim])
            return self.call(aten.permute.default, whole, back)
        split = []
        for piece in pieces:
            sizes = list(value_of(piece).shape)
            n = sizes[axis.dim] // axis.size(1)
            sizes[axis.dim : axis.dim + 1] = [axis.outer, n, axis.inner]
            split.append(self.call(aten.reshape.default, piece, sizes))
        whole = self.call(aten.cat.default, split, axis.dim + 1)
        return self.call(aten.reshape.default, whole, list(value.shape))

    def narrowed(self, node: fx.Node, total: fx.Node) -> fx.Node:
        """Bring a sum over tiles to the dtype of the output."""
        dtype = value_of(node).dtype
        if dtype not in NARROW:
            return total
        return self.call(aten._to_copy.default, total, dtype=dtype)

    def viewed(
        self, node: fx.Node, values: Mapping[fx.Node, fx.Node], size: int
    ) -> fx.Node:
        """Return a value of a tile, or a view of one, outside of the tile."""
        if node in values:
            return values[node]
        (base,) = node.all_input_nodes
        operands = {base: self.viewed(base, values, size)}
        view = for_tokens(self.graph, node, operands, self.part.result(node), size)
        view.meta.update(self.meta)
        return view

    def added(
        self, node: fx.Node, total: fx.Node | None, a: fx.Node, b: fx.Node
    ) -> fx.Node:
        """Add the product of a tile to a sum; in place once Inductor has seen to it."""
        share = {SHARE: node.meta[SHARE]} if SHARE in node.meta else {}
        if total is None:
            first = self.call(aten.mm.default, a, b)
            first.meta.update(share)
            wide = dtype_of_sums(value_of(node))
            if value_of(first).dtype == wide:
                return first
            return self.call(aten._to_copy.default, first, dtype=wide)
        call = self.graph.call_function(
            auto_functionalized_v2,
            (torch.ops.cp.add_product_.default,),
            {"a": a, "b": b, "_total_base_index": 0, "_all_bases": [total]},
        )
        value = value_of(total)
        call.meta.update(self.meta, val=(None, torch.empty_like(value)), **share)
        return self.call(operator.getitem, call, 1)

    def scaled(self, node: fx.Node, result: fx.Node) -> fx.Node:
        """Multiply a result by the gradient if it depends on it; tiles have taken 1."""
        gradient = self.part.gradient
        if gradient is None or node not in self.part.scaled:
            return result
        number = gradient
        if value_of(gradient).dim() > 0:
            number = self.call(aten.reshape.default, gradient, [])
        return self.call(aten.mul.Tensor, result, number)
