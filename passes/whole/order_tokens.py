"""Decide for every call of a joint graph in which order it sees tokens: a minimum cut.

    ids -> embedding -> .. -> ring -> .. -> loss, and the backward of all these
      ->
    ids, laid out -> embedding -> .. -> ring zigzag -> .. -> loss

A causal ring is quicker on laid out tokens (token_order), and calls that bring no
tokens together do not care. A minimum cut (layout_cut) decides for the whole graph,
forward and backward, which of them see tokens laid out, so that attention and what is
sent for other orders take the least time together.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.cost.choose import predict, rank
from cpcompile.cost.plans import Plan
from cpcompile.cost.relayout_cost import relayout_seconds, reorder_seconds
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.lengths import expected
from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.geometry.token_pieces import Piece, move_of
from cpcompile.logs import warn_unmet
from cpcompile.ops.comm.moved_tokens import WHOLE
from cpcompile.torch_private import pytree
from cpcompile.torch_private.dynamo import counters
from cpcompile.torch_private.fake_tensors import disable_current_modes

from ..graph.context import AttentionCall, Context, GraphInput
from ..model.layouts.layout_cut import LayoutCut
from .attention_nodes import forward_of, is_attention, keys_of, needs_order, plan_number
from .cut_constants import constants, is_cut
from .edges import is_written_back
from .local_calls import LocalCall
from .local_values import LocalValues
from .other_axes import MOVE
from .sequence_moves import MOVES, SPLITS
from .token_order import TokenOrder, Vertex

_MOVE = torch.ops.cp.moved_tokens.default


def order_tokens(
    known: LocalValues,
    calls: Sequence[fx.Node],
    results: Sequence[tuple[Any, Any]],
    order: TokenOrder,
) -> TokenOrder:
    """Decide which vertices are laid out.

    Args:
        known: what `calls` are, in the order of the sequence.
        results: those of the graph, with what AOTAutograd notes of each.
        order: the layout, and the lengths of sequences that have to be laid out.

    Raises: RewriteError where tokens have to be laid out, and cannot be.
    """
    lengths = list(order.lengths)
    for node in calls:
        made = known.made.get(node)
        if made is not None and made.call is not None:
            for move in _moves(made.call):
                _add_lengths(lengths, move)
    for node, chunks in known.chunks.items():
        for x in filter(known.is_shard, pytree.tree_leaves(known.values[node])):
            size = x.shape[x.placements[known.ctx.axis].dim]
            if size not in lengths and size * chunks.count in lengths:
                lengths.append(size)
    ordering = _Ordering(known, replace(order, lengths=lengths))
    return ordering.solve(calls, results)


def relayouts(graph: fx.Graph) -> int:
    """Count the relayouts of the forward in a local joint graph."""
    found = graph.find_nodes(op="call_function", target=torch.ops.cp.relayout.default)
    return sum(x.meta.get("partitioner_tag") != "is_backward" for x in found)


def result_vertex(place: int | None, number: int) -> Vertex:
    """Return the vertex of a result of a graph.

    place: in what the model returns; None if it returns no such thing. number: among
        all results.
    """
    return ("gradient", number) if place is None else ("result", place)


class _Ordering:
    """The vertices of one graph. order: without what the cut decides."""

    def __init__(self, known: LocalValues, order: TokenOrder) -> None:
        self.known, self.edges, self.ctx = known, known.edges, known.ctx
        self.order = order
        self.cut = LayoutCut()
        self.vertices: dict[fx.Node, Vertex] = {}  # of values with tokens
        self.uses: dict[fx.Node, list[Vertex]] = {}
        self.reads: dict[fx.Node, dict[int, Vertex]] = {}
        self.attention: dict[AttentionCall, fx.Node] = {}

    def solve(
        self, calls: Sequence[fx.Node], results: Sequence[tuple[Any, Any]]
    ) -> TokenOrder:
        """Return the order that takes the least time.

        Raises: RewriteError where tokens have to be laid out, and cannot be.
        """
        import networkx  # type: ignore[import-untyped]  # slow to import; has no types

        for node in self.known.values:
            if node.op != "call_function":
                self._enter(node)
        for node in calls:
            if node not in self.known.plain:
                self._visit(node)
        for place, (x, note) in enumerate(results):
            self._leave(x, note, place)
        for producer, vertices in self.uses.items():
            seconds = None
            if producer not in self.known.chunks:
                seconds = self._relayout_seconds(self.known.values[producer])
            self.cut.feed(self.vertices[producer], vertices, producer, seconds)
        try:
            laid_out = self.cut.solve()
        except networkx.NetworkXUnbounded as error:
            layout = self.order.layout.value
            raise RewriteError(
                f"layout {layout}: inputs are in it, or it is asked for; tokens cannot "
                "be brought into it or back where they have to be; use contiguous "
                "inputs and options={'layout': 'contiguous'}"
            ) from error
        self._settle(laid_out)
        return replace(
            self.order,
            laid_out=frozenset(laid_out),
            reads=self.reads,
            vertices=self.vertices,
        )

    # Vertices

    def _add(
        self,
        vertex: Vertex,
        contiguous: float | None = 0.0,
        laid_out: float | None = 0.0,
    ) -> None:
        self.cut.add(vertex, contiguous, laid_out)

    def _has_tokens(self, x: Any) -> bool:
        return self.order.tokens_of(x) is not None

    def _enter(self, node: fx.Node) -> None:
        """Add an input that is a shard."""
        value = self.known.values[node]
        if not self._has_tokens(value):
            return
        self.vertices[node] = node
        place = self.edges.result_of_tangent(node)
        if place is not None:
            self._add(node)
            self.cut.same(node, result_vertex(place, 0))
            return
        known, _ = self.edges.input(node)
        assert known is not None, f"{node} is a shard"
        self._add(node, *self._given(known) if known.has_local_part else (0.0, 0.0))

    def _given(self, known: GraphInput) -> tuple[float | None, float | None]:
        """Return what an input, or its gradient, costs in either order."""
        return (None, 0.0) if known.layout is self.order.layout else (0.0, None)

    def _visit(self, node: fx.Node) -> None:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node):
            if self._has_tokens(self.known.values[node]) and source in self.vertices:
                keys = self.reads.get(source, {}).get(_result(node.args[1]))
                self.vertices[node] = keys or self.vertices[source]
            return
        values = pytree.tree_leaves(self.known.values[node])
        makes = any(self._has_tokens(x) for x in values)
        if not makes and not any(x in self.vertices for x in node.all_input_nodes):
            return
        if makes:
            self.vertices[node] = node
        if is_attention(node):
            self._attend(node)
        else:
            self._add(node, *self._seconds(node, values))
        own = self.reads.get(node, {})
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        for place, x in enumerate(leaves):
            if isinstance(x, fx.Node) and x in self.vertices:
                self.uses.setdefault(x, []).append(own.get(place, node))

    def _seconds(
        self, node: fx.Node, values: Sequence[Any]
    ) -> tuple[float | None, float | None]:
        """Return the seconds that a call takes in either order, beside its own."""
        if is_written_back(node):
            known, _ = self.edges.input(node.all_input_nodes[0])
            is_part = known is not None and known.has_local_part
            return self._given(known) if known is not None and is_part else (0.0, None)
        made = self.known.made[node]
        if made.call is None:
            sources = [self.known.values[x] for x in node.all_input_nodes]
            return 0.0, self._reorder_seconds([*sources, *values])
        if node.target is MOVE:
            return 0.0, 0.0 if node in self.known.own_moves else None
        moves = _moves(made.call)
        if moves and node.target in (*MOVES, *SPLITS):
            found = [self._move_seconds(node, moves, x) for x in self._layouts()]
            return found[0] or 0.0, found[1]
        if constants(made.call, self.order, node.target) is None:
            return 0.0, None
        return 0.0, self._reorder_seconds(values) if made.scattered else 0.0

    def _layouts(self) -> tuple[Layout, Layout]:
        return Layout.CONTIGUOUS, self.order.layout

    def _attend(self, node: fx.Node) -> None:
        """Add attention: queries and results on one side, keys and values on one."""
        forward = forward_of(node)
        ordered = needs_order(node)
        (keys, results), vertex = keys_of(node), (forward, "keys")
        if node is forward:
            queries = self.known.values[node.all_input_nodes[0]]
            self._add(node, *self._attention_seconds(node, queries, ordered))
            if not ordered:
                self._add(vertex)
        else:
            self._add(node)
            self.cut.same(node, forward)
        if not ordered:
            places = [*keys, *map(_result, results)]
            self.reads[node] = dict.fromkeys(places, vertex)

    def _attention_seconds(
        self, node: fx.Node, queries: Any, ordered: bool
    ) -> tuple[float | None, float | None]:
        if not ordered:
            return 0.0, 0.0
        number, findings = plan_number(node), self.ctx.findings
        call = None if number is None else list(findings.plans)[number]
        if call is None or call not in findings.balanced_plans:
            return 0.0, None
        self.attention[call] = node
        if not self._is_whole(queries):
            return 0.0, None
        form = findings.plans[call].chosen
        found = [
            _seconds_of(form, plans[call], layout)
            for plans, layout in zip(
                (findings.contiguous_plans, findings.balanced_plans),
                self._layouts(),
                strict=True,
            )
        ]
        if self.ctx.layout is not None and found[1] is not None:
            return None, 0.0
        return found[0], found[1]

    def _leave(self, x: Any, note: Any, place: int) -> None:
        """Add the read of a result, or of the gradient of an input."""
        if not isinstance(x, fx.Node) or x not in self.vertices:
            return
        value = self.known.values[x]
        result, known = self.edges.place(note), self.edges.gradient(note)
        vertex = result_vertex(result, place)
        seconds: tuple[float | None, float | None]
        if known is not None and known.has_local_part:
            seconds = self._given(known)
        elif result is not None and self.edges.results.get(result) is not None:
            seconds = self._given_any(value)
        else:
            seconds = 0.0, self._reorder_seconds([value])
        self._add(vertex, *seconds)
        self.uses.setdefault(x, []).append(vertex)

    def _given_any(self, value: Any) -> tuple[float | None, float | None]:
        """Return the seconds of a result that leaves as a shard."""
        tokens = self.order.tokens_of(value)
        alike = [
            x.layout is self.order.layout
            for x in self.edges.inputs
            if tokens is not None and x.tokens == tokens[0]
        ]
        return (None, 0.0) if self.ctx.keeps_layout and any(alike) else (0.0, None)

    # Prices, of the first rank's part, which are the same on all ranks

    def _is_whole(self, value: Any) -> bool:
        """Tell whether a dimension has the tokens, and nothing besides."""
        tokens = self.order.tokens_of(value)
        if tokens is None:
            return False
        length, dim = tokens
        return dim.outer == 1 and value.shape[dim.dim] == length

    def _relayout_seconds(self, value: Any) -> float | None:
        tokens = self.order.tokens_of(value)
        if tokens is None or not self._is_whole(value):
            return None
        length, dim = tokens
        return self._sent_seconds(value, dim.dim, -(-length // self.ctx.ranks))

    def _sent_seconds(self, value: DTensor, dim: int, tokens: int) -> float:
        """Return the seconds to send tokens of a value."""
        # Not by the entries that this rank has: it may have no token.
        sizes = [n for i, n in enumerate(value._local_tensor.shape) if i != dim]
        size = math.prod(map(expected, sizes)) * tokens * value.element_size()
        return relayout_seconds(self.ctx.profile, self.ctx.ranks, size)

    def _reorder_seconds(self, values: Iterable[Any]) -> float:
        sizes = [bytes_of([x]) for x in values if self._has_tokens(x)]
        return sum(reorder_seconds(self.ctx.profile, size) for size in sizes)

    def _move_seconds(
        self, node: fx.Node, moves: Sequence[fx.Node], layout: Layout
    ) -> float | None:
        """Return the seconds of a call that moves tokens; None if it cannot be."""
        values = pytree.tree_leaves(self.known.values[node])
        value = values[0]
        operands = [self.known.values[x] for x in node.all_input_nodes]
        cut = [x for x in (*values, *operands) if is_cut(x, self.order)]
        of_batch = any("*" in str(move.args[3]) for move in moves)
        known = not of_batch and all(map(self._has_tokens, cut))
        if layout is not Layout.CONTIGUOUS and not known:
            return None
        sent = sum(_sent(move, layout, self.ctx.ranks) for move in moves)
        tokens = self.order.tokens_of(value)
        if not sent or tokens is None:
            return 0.0
        return self._sent_seconds(value, tokens[1].dim, sent)

    # Plans

    def _settle(self, laid_out: set[Hashable]) -> None:
        """Write the plan of every attention call for the order that was chosen."""
        findings = self.ctx.findings
        for call, node in self.attention.items():
            beside = any(
                (self.vertices[x] in laid_out) != (node in laid_out)
                for x in node.all_input_nodes
                if x in self.vertices
            )
            asked = self.ctx.layout not in (None, Layout.CONTIGUOUS)
            if asked and node not in laid_out:
                where, unmet = (
                    f"attention at {call.path}",
                    f"layout {self.ctx.layout!r}",
                )
                warn_unmet(where, unmet, "its operands are not split on the tokens")
            findings.plans[call] = compared(self.ctx, call, node in laid_out, beside)


def _moves(call: LocalCall) -> list[fx.Node]:
    return list(call.module.graph.find_nodes(op="call_function", target=_MOVE))


def _add_lengths(lengths: list[int], move: fx.Node) -> None:
    """Add the lengths to which, or from which, tokens of a sequence are moved.

    Not a multiple of another one: a dimension with twice as many entries could have two
    for every token as well.
    """
    _, _, sources, _, _, length, *_ = move.args
    found = {*sources, length}  # type: ignore[misc]
    if found & {*lengths}:
        for n in sorted(found):
            if n > 1 and all(n % known and known % n for known in lengths):
                lengths.append(n)


def _result(index: Any) -> int:
    """Return the key of a result among the places of arguments."""
    return -1 - int(index)


def _sent(move: fx.Node, layout: Layout, ranks: int) -> int:
    """Count the tokens that the first rank sends for a call of cp::moved_tokens."""
    lengths: Any
    fields: Any
    length: Any
    _, _, lengths, names, fields, length, *_ = move.args
    sources = zip(lengths, str(names).split(), strict=False)
    every = tuple(
        None if name == WHOLE else TokenLayout.of(layout, n, ranks)
        for n, name in sources
    )
    width = len(Piece._fields)
    pieces = tuple(Piece(*fields[i : i + width]) for i in range(0, len(fields), width))
    result = TokenLayout.of(layout, length, ranks)
    with disable_current_modes():
        return sum(move_of(every, pieces, result, 0, torch.device("cpu")).sent)


def _seconds_of(form: Any, plan: Plan, layout: Layout) -> float | None:
    """Return the seconds of a strategy in a layout; None if it has no such plan."""
    for x in (plan.chosen, *plan.candidates):
        same = x.strategy is form.strategy and x.degrees == form.degrees
        if same and x.layout is layout and x.excluded is None and not x.relayout:
            return x.seconds
    return None


# Relayouts of a call that would be laid out by itself: of q, k, v and of its output.
# Relayouts of a call that would be laid out by itself: of q, k, v and of its output.
_PER_CALL = 4


def note_relayouts(ctx: Context, left: int, calls: int) -> None:
    """Note how many relayouts the forward has; calls: in a balanced layout."""
    cancelled = _PER_CALL * calls - left
    ctx.findings.relayouts, ctx.findings.relayouts_cancelled = left, cancelled
    counters["cpcompile"]["relayouts_left"] += left
    counters["cpcompile"]["relayouts_cancelled"] += cancelled


def compared(ctx: Context, call: AttentionCall, laid_out: bool, relaid: bool) -> Plan:
    """Return the plan of a call, with the candidates of both layouts.

    relaid: whether relayouts of its operands or its output stay.
    """
    before, balanced = (
        ctx.findings.contiguous_plans[call],
        ctx.findings.balanced_plans[call],
    )
    free = list(balanced.candidates)
    form = dataclasses.replace(balanced.chosen, relayout=True)
    budget = float("inf")  # a relayout needs no more memory than the call
    paid = predict(form, balanced.workload, ctx.profile, budget)
    if laid_out:
        chosen = paid if relaid else balanced.chosen
        problem = "its relayouts stay in this graph" if relaid else None
    else:
        chosen, problem = before.chosen, "relayouts would cost more than it saves"
    if problem is not None:
        free = [dataclasses.replace(c, excluded=c.excluded or problem) for c in free]
    every = [*before.candidates, *free, paid]
    candidates = rank(every, ctx.tie_fraction, ctx.attention_bytes)
    return dataclasses.replace(before, chosen=chosen, candidates=candidates)
