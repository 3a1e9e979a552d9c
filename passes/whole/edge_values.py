"""The values of inputs, and how results and gradients leave a local joint graph."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import py_sym_types

from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import hashable, is_symbol
from cpcompile.torch_private import pytree

from ..graph.context import GraphInput, InputKind
from .edges import COPY, Edges, gradient_as, placed_as
from .local_calls import LocalCalls, replicated
from .local_values import LocalValues
from .order_tokens import result_vertex
from .other_axes import Chunks, chunk_in_order, order_in_chunks
from .token_order import TokenOrder, in_natural_order


class EdgeValues(LocalValues):
    """Local values, with those at the edges.

    lengths: of the sequences that inputs have. inputs: the values of those that are
    shards outside.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        edges: Edges,
        calls: LocalCalls,
        order: TokenOrder,
    ) -> None:
        super().__init__(joint.graph, edges, calls, order)
        self.joint = joint
        self.lengths: set[Any] = set()
        self.inputs: dict[fx.Node, Tensor] = {}
        self._results = self.graph.output_node().args

    def enter_all(self) -> None:
        """Give inputs and constants their values.

        The gradient of a result gets its own when it is read.
        """
        inputs = self.graph.find_nodes(op="placeholder")
        for node in inputs:
            self._note_length(node)
        for node in [*inputs, *self.graph.find_nodes(op="get_attr")]:
            self.like = node
            self._enter(node)

    def leave_all(self) -> None:
        """Have the graph return the local results."""
        pairs = enumerate(self.results_with_notes())
        leaves = [self._leave(*pair, i) for i, pair in pairs]
        output = self.graph.output_node()
        _, tree = pytree.tree_flatten(output.args[0])
        output.args = (pytree.tree_unflatten(leaves, tree),)

    def return_whole(self) -> None:
        """Have the graph return what it did."""
        self.graph.output_node().args = self._results

    def _note_length(self, node: fx.Node) -> None:
        known, _ = self.edges.input(node)
        if known is None:
            return
        for p in self.edges.placements_inside(known):
            if isinstance(p, Shard):
                self.lengths.add(hashable(node.meta["val"].shape[p.dim]))

    def _enter(self, node: fx.Node) -> None:
        """Give an input its value; a gradient of a result gets it when it is read."""
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(self.joint, str(node.target))
        if self.edges.result_of_tangent(node) is not None:
            return
        self.values[node], self.local[node] = value, node
        self.plain.add(node)
        known, learns = self.edges.input(node)
        if known is None or not isinstance(value, Tensor):
            return
        placements = self.edges.placements_inside(known)
        whole = replicated(value, self.ctx.mesh)
        if known.has_local_part:
            shard = self._given(node, whole, placements)
            if known.chunks is not None:
                self.chunks[node] = Chunks.of(known.chunks)
            if value.is_floating_point():
                self.plain.discard(node)
                self.values[node] = shard
            else:
                self._enter_parts(node, shard, known)
        elif known.kind is InputKind.FULL:
            if value.is_floating_point():
                self.plain.discard(node)
                part = self.cut(whole, node, placements, self.order.is_laid_out(node))
                self.values[node], self.local[node] = part
            else:
                for laid_out in self.sides:
                    part = self.cut(whole, node, placements, laid_out)
                    self.parts[laid_out][node] = part
        elif learns:
            self.plain.discard(node)
            self.values[node] = whole

    def _enter_parts(self, node: fx.Node, shard: DTensor, known: GraphInput) -> None:
        """Gather ids that are a shard outside; this rank has its part of them."""
        given = known.layout is not Layout.CONTIGUOUS
        whole = self.gathered(shard, node, given)
        self.values[node], self.local[node] = whole[0]._local_tensor, whole[1]
        for laid_out in self.sides:
            self.parts[laid_out][node] = shard, node
            if laid_out is not given:
                part = self.cut(*whole, shard.placements, laid_out)
                self.parts[laid_out][node] = part

    def _given(self, node: fx.Node, whole: DTensor, placements: Any) -> DTensor:
        """Return the shard that an input is outside."""
        shard = placed_as(whole, placements)
        self.inputs[node] = shard._local_tensor
        return shard

    def _enter_gradient(self, node: fx.Node, place: int) -> None:
        result = self._result_at(place)
        placements = self.edges.leaves(place, self.values[result])
        self.edges.leaves_chunks(place, self.chunks.get(result))
        whole = replicated(node.meta["val"], self.ctx.mesh)
        given = self._given(node, whole, placements)
        self.values[node], self.local[node] = given, node
        if place in self.edges.chunks:
            self.chunks[node] = self.edges.chunks[place]
        inside = self.values[result]
        if self.is_shard(inside) and not self.is_shard(given):
            to = [p if isinstance(p, Shard) else Replicate() for p in inside.placements]
            self.like = node
            pair = self.cut(given, node, tuple(to), self.order.is_laid_out(node))
            self.values[node], self.local[node] = pair

    def results_with_notes(self) -> list[tuple[Any, Any]]:
        leaves = pytree.tree_leaves(self._results[0])
        notes = pytree.tree_leaves(self.graph.output_node().meta.get("desc"))
        if len(notes) != len(leaves):
            notes = [None] * len(leaves)
        return list(zip(leaves, notes, strict=True))

    def _result_at(self, place: int) -> fx.Node:
        pairs = self.results_with_notes()
        found: fx.Node = {self.edges.place(note): x for x, note in pairs}[place]
        return found

    def _leave(self, x: Any, note: Any, number: int) -> Any:
        """Return the local node of a result."""
        if not isinstance(x, fx.Node):
            return x
        self.like, value = x, self.value(x)
        if isinstance(value, py_sym_types):
            if is_symbol(value):
                return self.write(_size, (value,), ())[1]
            return x if x.op == "placeholder" else value.node.maybe_as_int()
        place, known = self.edges.place(note), self.edges.gradient(note)
        if place is not None:
            placements = self.edges.leaves(place, value)
        if not isinstance(value, DTensor):
            return self.local[x]
        laid_out = result_vertex(place, number) in self.order.laid_out
        self.in_order(x, laid_out)
        value, local = self.ordered_as(x, laid_out)
        chunks = None if known is None else known.chunks
        to = None if chunks is None else Chunks.of(chunks)
        args: Any
        if place is not None:
            self.edges.leaves_chunks(place, self.chunks.get(x))
            to = self.edges.chunks.get(place)
        value, local = self.as_chunks(x, value, local, to, laid_out)
        outside = self.edges.everywhere
        if known is not None:
            if known.has_local_part:
                outside = self.edges.placements_inside(known)
            args = (value, known.gradient, outside)
            pair = self.write(gradient_as, args, (local,))
        else:
            if place is not None:
                outside = placements
            pair = self.write(placed_as, (value, outside), (local,))
        tokens = self.order.tokens_of(value) if laid_out else None
        if tokens is None:
            return pair[1]
        if outside == self.edges.everywhere:
            length, dim = tokens
            args = pair[0], dim, self.order.of_length(length)
            return self.write(in_natural_order, args, (pair[1],))[1]
        if place is not None:
            self.edges.laid_out(place, self.order.layout)
        return pair[1]

    def write_back(self, x: fx.Node, new: fx.Node) -> tuple[Any, Any]:
        """Write into an input what it is after the call, as it lies outside."""
        known, _ = self.edges.input(x)
        outside, laid_out, chunks = self.edges.everywhere, False, None
        if known is not None and known.has_local_part:
            outside = self.edges.placements_inside(known)
            laid_out = known.layout is not Layout.CONTIGUOUS
            chunks = None if known.chunks is None else Chunks.of(known.chunks)
        self.in_order(new, laid_out)
        value, local = self.ordered_as(new, laid_out)
        if isinstance(value, DTensor):
            value, local = self.as_chunks(new, value, local, chunks, laid_out)
            value, local = self.write(placed_as, (value, outside), (local,))
            value = value._local_tensor
        elif outside != self.edges.everywhere:
            whole = replicated(value, self.ctx.mesh)
            value, local = self.cut(whole, local, outside, laid_out)
            value = value._local_tensor
        memory = self.inputs.get(x, x.meta["val"])
        return self.write(COPY, (memory, value), (x, local))

    def in_order(self, x: fx.Node, laid_out: bool) -> None:
        """Bring token chunks in order, unless they are read laid out as they are.

        Chunks are of the whole sequence, and no sequence that could be sent for
        another order.
        """
        if x in self.chunks and self.order.is_laid_out(x) is not laid_out:
            self.order_chunks(x)

    def order_chunks(self, x: fx.Node) -> None:
        """Bring token chunks in order, and to the ranks that had them."""
        how = None, self.order.is_laid_out(x)
        pair = self.as_chunks(x, self.values[x], self.local[x], *how)
        self.values[x], self.local[x] = pair
        del self.chunks[x]

    def as_chunks(
        self,
        node: fx.Node,
        value: DTensor,
        local: Any,
        to: Chunks | None,
        laid_out: bool,
    ) -> tuple[DTensor, Any]:
        """Bring a value to the chunks in which it leaves; None is in order."""
        chunks = self.chunks.get(node)
        either = chunks or to
        if either is None or chunks == to or not self.is_shard(value):
            return value, local
        where = value.placements
        tokens = self.tokens_of_chunk(value, either) if laid_out else None
        if chunks is not None:
            args: Any = value, chunks, tokens
            value, local = self.write(chunk_in_order, args, (local,))
            if to is None:
                return self.cut(value, local, where, laid_out)
        else:
            value, local = self.gathered(value, local, laid_out)
        dim = where[self.ctx.axis].dim  # type: ignore[attr-defined]  # a shard
        return self.write(order_in_chunks, (value, dim, to, tokens), (local,))

    def value(self, node: fx.Node) -> Any:
        if node not in self.values:
            place = self.edges.result_of_tangent(node)
            assert place is not None, f"{node} has no value"
            self._enter_gradient(node, place)
        return self.values[node]


def _size(n: Any) -> Any:
    """Return n; traced, it becomes what computes n of the symbols."""
    return n
