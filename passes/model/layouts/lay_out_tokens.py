"""Decide for every value in which layout its tokens are, by a minimum cut.

    tokens -> embedding -> ... -> ring -> ... -> logits -> loss
      ->
    tokens, labels, laid out -> embedding -> ... -> ring zigzag -> ... -> logits -> loss

A balanced layout is a permutation of the tokens, and calls that are proved token-wise
commute with it (permutation_proof). Between them the layout is free: a minimum cut
(layout_cut) decides for the whole graph, checkpoint regions included, which values are
laid out, so that relayouts and attention together take the least time. Relayouts stand
only where a value is read on the other side of the cut. What is cut from a full tensor
(token ids, labels, position tables) is cut laid out; random and token-mixing calls, and
whatever is not proved, see contiguous tokens.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.cost.choose import predict, rank
from cpcompile.cost.plans import Plan
from cpcompile.cost.relayout_cost import relayout_seconds, reorder_seconds
from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import expected
from cpcompile.logs import warn_unmet
from cpcompile.torch_private import pytree
from cpcompile.torch_private.dynamo import counters

from ...graph.context import AttentionCall, Context
from ...graph.cp_attention import call_of
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_graphs,
    all_nodes,
    expected_shape,
    fake_mode_of,
    fake_value,
    output_nodes,
)
from ...graph.sequence_tokens import TokenDim, placed_sequence_dim
from ...placement.graph_writer import GraphWriter
from ...placement.placement_calls import (
    cp_gather,
    cp_gather_tokens,
    cp_key_source,
    cp_place,
    cp_shard,
)
from ...placement.token_moves import cp_move_tokens, cp_split_tokens, tokens_sent
from ...placement.token_picks import cp_gather_at, cp_pick_tokens
from ..attention.insert_attention import change_plan, set_layout
from .layout_cut import LayoutCut
from .permutation_proof import PermutationProofs
from .token_graph import LayoutPrices, TokenGraph, Use

RELAYOUT = torch.ops.cp.relayout.default
MOVES = (cp_move_tokens, cp_split_tokens)
PICKS = (cp_pick_tokens, cp_gather_at)
# Relayouts of a call that would be laid out by itself: of q, k, v and of its output.
_PER_CALL = 4


@graph_pass(
    reads=(
        "calls",
        "masks",
        "contiguous_plans",
        "balanced_plans",
    ),
    writes=(
        "plans",
        "outputs",
        "relayouts",
        "relayouts_cancelled",
        "shared",
    ),
)
def lay_out_tokens(graph: fx.Graph, ctx: Context) -> int:
    """Lay out tokens; return how many attention calls work on laid out tokens."""
    balanced = {
        call: plan.layout
        for call, plan in ctx.findings.plans.items()
        if plan.layout is not Layout.CONTIGUOUS
    }
    layouts = {call.q_shape[-2]: layout for call, layout in balanced.items()}
    waiting = layouts | _given_layouts(ctx)
    while waiting:
        tokens, layout = next(iter(waiting.items()))
        others = [
            n
            for n in _moved_lengths(graph, ctx, tokens)
            if ctx.length is None and waiting.get(n, layout) is layout
        ]  # none beside a symbol, whose tokens are proved by themselves
        _LaidOut(graph, ctx, tokens, layout, others).rewrite()
        for n in (tokens, *others):
            waiting.pop(n, None)
    graphs = all_graphs(graph)
    left = sum(len(x.find_nodes(op="call_function", target=RELAYOUT)) for x in graphs)
    note_relayouts(ctx, left, len(balanced))
    return sum(
        plan.layout is not Layout.CONTIGUOUS for plan in ctx.findings.plans.values()
    )


def note_relayouts(ctx: Context, left: int, calls: int) -> None:
    """Note how many relayouts the forward has; calls: in a balanced layout."""
    cancelled = _PER_CALL * calls - left
    ctx.findings.relayouts, ctx.findings.relayouts_cancelled = left, cancelled
    counters["cpcompile"]["relayouts_left"] += left
    counters["cpcompile"]["relayouts_cancelled"] += cancelled


def _given_layouts(ctx: Context) -> dict[int, Layout]:
    """Return the layouts of inputs that are not contiguous, by number of tokens."""
    return {
        graph_input.tokens: graph_input.layout
        for graph_input in ctx.inputs.values()
        if graph_input.layout is not Layout.CONTIGUOUS
    }


def _moved_lengths(graph: fx.Graph, ctx: Context, tokens: int) -> list[int]:
    """List the lengths to which, or from which, tokens of a sequence are moved.

    Not one that is a multiple of another; see Note [Layouts of moved tokens].
    """
    found: set[int] = set()
    for node in all_nodes(graph):
        if node.target not in MOVES:
            continue
        values = pytree.tree_leaves([*map(fake_value, (node, *node.all_input_nodes))])
        sequences = [placed_sequence_dim(x, ctx.axis) for x in values]
        sizes = {x.tokens for x in sequences if x is not None}
        if tokens in sizes or found & sizes:
            found |= sizes - {tokens}
    chosen = [tokens]
    for length in sorted(found):
        if length > 1 and all(length % n and n % length for n in chosen):
            chosen.append(length)
    return chosen[1:]


class _LaidOut:
    """The rewrite of a graph for one sequence length and its layout.

    others: lengths to which tokens of the sequence are moved.
    """

    def __init__(
        self,
        graph: fx.Graph,
        ctx: Context,
        tokens: int,
        layout: Layout,
        others: Sequence[int],
    ) -> None:
        self.graph, self.ctx, self.layout = graph, ctx, layout
        self.lengths = (tokens, *others)
        self.writer = GraphWriter.of_sharded(graph, ctx)
        symbolic = ctx.length is not None and expected(ctx.length) == tokens
        fake_mode = fake_mode_of(graph)
        proofs = PermutationProofs(ctx.mesh, ctx.axis, tokens, fake_mode, symbolic)
        of_others = [
            PermutationProofs(ctx.mesh, ctx.axis, n, fake_mode)
            for n in others
            if not symbolic
        ]
        self.cut = LayoutCut()
        prices = LayoutPrices(
            self._relayout_price,
            self._reorder_price,
            self._attention,
            self._move_price,
            layout,
        )
        self.tokens_of = TokenGraph(ctx, proofs, self.cut, prices, of_others)
        self._placed: dict[tuple[fx.Graph, fx.Node, TokenDim], fx.Node] = {}

    def rewrite(self) -> None:
        import networkx  # type: ignore[import-untyped]  # slow to import; has no types

        self.tokens_of.build(self.graph)
        try:
            laid_out = self.cut.solve()
        except networkx.NetworkXUnbounded as error:
            raise RewriteError(
                f"layout {self.layout.value}: inputs are in it, or it is asked for; "
                "tokens cannot be brought into it or back where they have to be; use "
                "contiguous inputs and options={'layout': 'contiguous'}"
            ) from error
        token_graph = self.tokens_of
        relaid: set[fx.Node] = set()  # attention calls beside a relayout that stays
        for producer, uses in token_graph.uses.items():
            side = token_graph.vertices[producer] in laid_out
            crossing_uses = [use for use in uses if (use.vertex in laid_out) != side]
            if crossing_uses:
                self._relay(producer, crossing_uses, side)
                relaid |= {use.node for use in crossing_uses} | {producer}
        for node in token_graph.nodes:
            if node in laid_out:
                self._lay_out(node)
        self._mark_results(laid_out)
        for node in token_graph.nodes:
            call = call_of(node)
            if call is None or call.q_shape[-2] not in self.lengths:
                continue
            if call in self.ctx.findings.plans:
                beside = not relaid.isdisjoint((node, *node.users))
                self._settle(node, call, node in laid_out, beside)

    def _mark_results(self, laid_out: set[Any]) -> None:
        """Note the layout for results that leave the graph laid out."""
        for i, result in enumerate(output_nodes(self.graph)):
            placement = self.ctx.findings.outputs[i]
            if result in laid_out and placement is not None:
                marked = dataclasses.replace(placement, layout=self.layout)
                self.ctx.findings.outputs[i] = marked

    def _relay(self, producer: fx.Node, uses: list[Use], laid_out: bool) -> None:
        layouts = (Layout.CONTIGUOUS, self.layout)
        source, target = layouts[::-1] if laid_out else layouts
        dim = self.tokens_of.dim(fake_value(producer))
        assert dim is not None
        with _after(producer):
            length = self._length(producer, dim, fake_value(producer))
        args = (producer, dim.dim, length, source.value, target.value)
        with _after(producer if isinstance(length, int) else length):
            moved = self.writer.call(
                RELAYOUT, (*args, self.ctx.group_name), like=producer
            )
        for use in uses:
            use.read_instead(producer, moved)

    def _lay_out(self, node: fx.Node) -> None:
        """Rewrite a node on laid out tokens: its constants, its cut, or its gather."""
        value = fake_value(node)
        if node.target in (*MOVES, *PICKS):
            node.kwargs = {**node.kwargs, "layout": self.layout.value}
            return
        for constant, dim in self.tokens_of.constants.get(node, {}).items():
            node.replace_input_with(constant, self._place(node, constant, dim))
        if node.target in (cp_shard, cp_place):
            node.target = cp_place
            with node.graph.inserting_before(node):
                where = self.tokens_of.dim(value)
                length = self._length(node.args[0], where, value)
            place: Any = (
                self.writer.cp_axis,
                value.placements,
                length,
                self.layout.value,
            )
            node.args = (node.args[0], *place)
        elif node.target is cp_gather:
            (source,) = node.args
            where = self.tokens_of.dim(fake_value(source))
            with node.graph.inserting_before(node):
                length = self._length(source, where, fake_value(source))
            node.target = cp_gather_tokens
            how: Any = (self.writer.cp_axis, length, self.layout.value)
            node.args = (source, *how)
        elif node.target is cp_key_source:
            source = node.all_input_nodes[0]
            where = self.tokens_of.dim(fake_value(source))
            with node.graph.inserting_before(node):
                length = self._length(source, where, fake_value(source))
            how = (self.writer.cp_axis, length, self.layout.value)
            node.args = (source, *how)

    def _length(self, source: Any, dim: TokenDim | None, like: Any) -> int | fx.Node:
        """Return the number of tokens, as an argument: a number or a node.

        source: a value that has the tokens in `dim`. like: a sharded value that has
            these tokens.
        """
        proofs = self.tokens_of.proofs_of(like)
        if not proofs.symbolic:
            return proofs.tokens
        assert dim is not None, f"{source} has no tokens"
        size = fake_value(source).shape[dim.dim]
        args = (source, dim.dim)
        length = self.writer.call(torch.Tensor.size, args, like=source)
        entries_per_token = expected(size) // proofs.tokens  # in the same dimension
        if entries_per_token > 1:
            with length.graph.inserting_after(length):
                args = (length, entries_per_token)
                length = self.writer.call(operator.floordiv, args, like=source)
        return length

    def _place(self, node: fx.Node, constant: fx.Node, dim: TokenDim) -> fx.Node:
        """Cut a replicated input with tokens for the ranks; once per graph."""
        key = (node.graph, constant, dim)
        if key not in self._placed:
            placements = list(fake_value(constant).placements)
            placements[self.ctx.axis] = dim.placement
            with node.graph.inserting_before(node):
                length = self._length(
                    constant, dim, self.tokens_of.sequence_value(node)
                )
                where = (
                    self.writer.cp_axis,
                    tuple(placements),
                    length,
                    self.layout.value,
                )
                placed = self.writer.call(cp_place, (constant, *where), like=node)
            self._placed[key] = placed
        return self._placed[key]

    def _settle(
        self, node: fx.Node, call: AttentionCall, laid_out: bool, relaid: bool
    ) -> None:
        """Write the plan of an attention call for the layout that was chosen."""
        ctx = self.ctx
        if call not in ctx.findings.balanced_plans:
            return
        if not laid_out and ctx.layout not in (None, Layout.CONTIGUOUS):
            why = "its operands are not split on the tokens"
            warn_unmet(
                f"attention at {call.path}", f"layout {self.layout.value!r}", why
            )
        plan = (
            ctx.findings.balanced_plans if laid_out else ctx.findings.contiguous_plans
        )[call]
        if plan.layout is not ctx.findings.plans[call].layout:
            node = change_plan(node, plan, ctx)
        if laid_out:
            set_layout(node, self.layout)
        ctx.findings.plans[call] = compared(ctx, call, laid_out, relaid)

    def _relayout_price(self, value: DTensor) -> float:
        """Return the seconds of a relayout of a value, on the first rank."""
        dim = self.tokens_of.dim(value)
        assert dim is not None
        tokens = -(-expected(value.shape[dim.dim]) // self.ctx.ranks)
        return self._sent_price(value, dim.dim, tokens)

    def _reorder_price(self, value: Tensor) -> float:
        size = math.prod(expected_shape(value)) * value.element_size()
        return reorder_seconds(self.ctx.profile, size)

    def _move_price(self, node: fx.Node, layout: Layout) -> float:
        """Return the seconds of a call that moves tokens, on the first rank."""
        value = pytree.tree_leaves(fake_value(node))[0]
        _, _, dim, *_ = node.args
        sent = tokens_sent(node, layout, self.ctx.ranks)
        return self._sent_price(value, dim, sent) if sent else 0.0

    def _sent_price(self, value: DTensor, dim: Any, tokens: int) -> float:
        """Return the seconds to send tokens, the same on all ranks, and a gradient."""
        sizes = list(expected_shape(value.to_local()))
        sizes[dim] = tokens
        size = math.prod(sizes) * value.element_size()
        passes = 2 if self.ctx.backward and value.requires_grad else 1
        return passes * relayout_seconds(self.ctx.profile, self.ctx.ranks, size)

    def _attention(self, node: fx.Node) -> tuple[float | None, float | None]:
        call = call_of(node)
        laid_out = None if call is None else self.ctx.findings.balanced_plans.get(call)
        if call is None or laid_out is None or call.q_shape[-2] not in self.lengths:
            return 0.0, None
        if self.ctx.layout is not None:
            return None, 0.0
        return self.ctx.findings.contiguous_plans[
            call
        ].chosen.seconds, laid_out.chosen.seconds


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


def _after(node: fx.Node) -> Any:
    """Return the context to insert nodes that read `node`."""
    if node.op == "placeholder":
        node = node.graph.find_nodes(op="placeholder")[-1]
    return node.graph.inserting_after(node)
