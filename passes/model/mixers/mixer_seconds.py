"""Price the calls and values of a graph on either side, by cost/mixer_prices.py.

A call has one price for each way: on the side of the tokens, by the cheapest strategy
there, and on the side of each class of entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.fx as fx
from torch import Tensor

from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_prices import MixerPrices, Summary
from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.ops.mixers.mixer_work import forward_work, shapes_of
from cpcompile.ops.mixers.state_passing import passes_states

from ...graph.calls import spelled
from ...graph.context import Context
from ...graph.mixer_calls import is_mixer, mixer_call, mixer_operands
from ...graph.nodes import expected_shape, fake_value
from ...graph.sequence_tokens import TokenDim
from ...placement.scan_calls import joined_operands
from ..tokens.convolutions import convolved, is_taken_in
from ..tokens.dim_flows import dim_flows
from ..tokens.dim_group import CREATIONS, DimGroup
from ..tokens.mixed_sequence import (
    MixedSequence,
    dim_size,
    moves_little,
    stays_on_tokens,
)

DEAR = 1e6  # seconds: a price for what the user has ruled out
Seconds = dict[MixerStrategy, float]


def has_strategies(node: fx.Node) -> bool:
    """Tell whether a call that mixes tokens can be more than exchanged or gathered."""
    return is_mixer(node) or bool(joined_operands(node))


class MixerSeconds:
    """Seconds of calls and messages, forward and backward, on one sequence.

    is_laid_out: whether attention may lay out its tokens, so that what is exchanged
    needs a relayout, too.
    """

    def __init__(self, sequence: MixedSequence, ctx: Context) -> None:
        self._sequence, self._ctx = sequence, ctx
        given = (ctx.profile, ctx.ranks, ctx.backward)
        self._prices = MixerPrices.of_training(*given)
        self.is_laid_out = bool(ctx.findings.balanced_plans)

    def on_tokens(self, node: fx.Node) -> float:
        """Return the seconds of a call on the side of the tokens."""
        if node.op == "placeholder":
            return 0.0
        borrows = self._sequence.borrowed(node) is not None
        mixes, few = self._sequence.mixes(node), moves_little(node)
        if not mixes and not borrows:
            return self._of_other_tokens(node)
        if mixes and (borrows or not few) and self._forced is MixerStrategy.EXCHANGE:
            return DEAR
        if borrows:
            return self._of_halo(node)
        return self._of_move(node) if few else self._cheapest(node)[1]

    def on_entries(self, node: fx.Node, entries: DimGroup) -> float | None:
        """Return the seconds of a call in parts along entries; None if it has none."""
        if node.op == "placeholder":
            return 0.0 if node in self._sequence.links else None
        computed = self._sequence.computed.intersection(node.all_input_nodes)
        is_local = not computed or (
            entries.is_local(node) and _reads_entries(node, entries, computed)
        )
        gathered = self._gathered(node, entries)
        if any(self._sequence.is_written(x) for x in (node, *gathered)):
            return None
        if not is_local or stays_on_tokens(node):
            return None
        mixes = self._sequence.mixes(node) and not moves_little(node)
        if mixes and self._forced in self._ways(node):
            return DEAR
        return self._in_uneven_parts(node, entries) + self._of_gather(gathered)

    def of_exchange(self, node: fx.Node, entries: DimGroup) -> float | None:
        """Return the seconds to exchange a value; None if it cannot be exchanged."""
        tokens = self._sequence.tokens
        token_dim, dim = tokens.dims.get(node), entries.dims.get(node)
        if token_dim is None and self._sequence.is_of_others(node):
            return None
        if dim is not None and token_dim is None and dim.outer == 1:
            return self._of_gather([node])  # as a last state, which has no tokens
        if token_dim is None or dim is None or token_dim.dim == dim.dim:
            return None
        if token_dim.outer > 1 or dim.outer > 1 or self._sequence.is_written(node):
            return None
        if dim_size(node, token_dim) != tokens.entries:
            return None
        if dim_size(node, dim) != entries.entries and entries.entries % self._ctx.ranks:
            return None  # a rank's part would begin inside of an entry
        return self._exchanged(node)

    def of_strategies(self, node: fx.Node) -> Seconds:
        """Return the seconds of every strategy that is possible for a call."""
        dims = self._sequence.tokens.dims
        values = [x for x in (*node.all_input_nodes, *node.users) if x in dims]
        exchanges = [
            math.fsum(
                self._exchanged(x) if x in entries.dims else self._of_gather([x])
                for x in values  # what all entries read is gathered
            )
            + self._in_uneven_parts(node, entries)
            for entries in self._sequence.classes_of(node)
        ]
        return self._ways(node, exchanges)

    def strategy(self, node: fx.Node) -> MixerStrategy:
        """Return how a call is shared on the side of the tokens."""
        return self._cheapest(node)[0]

    @property
    def _forced(self) -> MixerStrategy | None:
        return self._ctx.mixer_strategy

    def _cheapest(self, node: fx.Node) -> tuple[MixerStrategy, float]:
        """Return the strategy on the side of the tokens, with its seconds."""
        ways = self._ways(node)
        if self._forced in ways:
            ways = {self._forced: ways[self._forced]}
        return min(ways.items(), key=lambda x: (x[1], x[0].value))

    def _ways(self, node: fx.Node, exchanges: Iterable[float] = ()) -> Seconds:
        dims, summary = self._sequence.tokens.dims, None
        operands = [bytes_of(x) for x in node.all_input_nodes if x in dims]
        if has_strategies(node):
            summary = self._summary(node)
        return self._prices.ways(self._of_work(node), operands, summary, exchanges)

    def _summary(self, node: fx.Node) -> Summary | None:
        """Return what ranks tell each other of their tokens; None if they cannot."""
        tokens = self._sequence.tokens
        if _uses_other_axes(self._ctx) or leaves_ranks_empty(
            tokens.entries, self._ctx.ranks
        ):
            return None
        joined = joined_operands(node)
        if joined:  # of an associative scan: what its last step gives
            if any(tokens.dims.get(x) != TokenDim(0) for x in joined):
                return None
            last = math.fsum(map(bytes_of, joined)) / tokens.entries
            return Summary(last, 0.0, 1.0)  # one step more for every result
        call, operands = mixer_call(node), mixer_operands(node)
        state, of_tokens = call.mixer.state, call.mixer.tokens
        if state is None or not passes_states(call):
            return None
        if any(
            tokens.dims.get(x) != TokenDim(of_tokens[name])
            for name, x in operands.items()
            if name in of_tokens
        ):
            return None
        values = {name: fake_value(x) for name, x in operands.items()}
        shape = expected_shape(call.with_final_state().empty_state(values))
        return Summary.of_state(shape, state.rows, state.columns)

    def _of_other_tokens(self, node: fx.Node) -> float:
        """Return the seconds of a call that brings no tokens of this sequence together.

        All ranks make it in full if no rank has a part of what it reads.
        """
        sequence = self._sequence
        operands = {
            x
            for x in sequence.computed.intersection(node.all_input_nodes)
            if isinstance(fake_value(x), Tensor)
        }
        if not operands or any(x in sequence.tokens.dims for x in operands):
            return 0.0
        if sequence.is_shared_in_others(node):
            return 0.0
        gathered: Iterable[fx.Node] = operands
        of_others = any(map(sequence.is_of_others, operands))
        if of_others and moves_little(node):
            return self._of_move(node)
        if of_others and self._forced is MixerStrategy.EXCHANGE:
            return DEAR
        if not dim_flows(node):  # else cut again where it is shorter, and gathered
            # Of several sequences all but the largest, along which DTensor shards it.
            by_size = sorted(operands, key=lambda x: (bytes_of(x), x))
            gathered = by_size[:-1] if of_others else []
        return self._prices.uneven(self._of_work(node), 1) + self._of_gather(gathered)

    def _gathered(self, node: fx.Node, entries: DimGroup) -> list[fx.Node]:
        """Return the operands that ranks must have in whole on the side of `entries`.

        All of its entries read them, and they are split along the tokens.
        """
        if spelled(node) in CREATIONS:
            return []
        return [
            x
            for x in node.all_input_nodes
            if x in self._sequence.tokens.dims
            and x in self._sequence.computed
            and x not in entries.dims
        ]

    def _of_gather(self, operands: Iterable[fx.Node]) -> float:
        """Return the seconds to gather values, and their gradients."""
        return self._prices.gathered(map(bytes_of, operands))

    def _of_move(self, node: fx.Node) -> float:
        """Return the seconds of a call that moves few tokens, or picks few."""
        if all(spelled(user) in CREATIONS for user in node.users):
            return 0.0  # nobody reads its numbers, so that nothing is sent
        if is_taken_in(node):
            return 0.0  # what the convolution borrows is priced
        tokens = self._sequence.tokens.entries
        moved = 0.0
        for size in filter(None, map(bytes_of, node.all_input_nodes)):
            others = abs(1 - bytes_of(node) / size) * tokens  # at one of the ends
            moved = max(moved, size / tokens * min(max(others, 1), tokens / 2))
        return self._prices.exchanged(moved)

    def _of_halo(self, node: fx.Node) -> float:
        """Return the seconds to borrow what a convolution reads beside a rank's own."""
        operands, borrowed = convolved(node), self._sequence.borrowed(node)
        if operands is None or not borrowed:
            return 0.0
        part = min(1.0, borrowed / self._sequence.tokens.entries)
        return self._prices.gathered([part * bytes_of(operands[0])])

    def _exchanged(self, node: fx.Node) -> float:
        return self._prices.exchanged(bytes_of(node), fake_value(node).requires_grad)

    def _in_uneven_parts(self, node: fx.Node, entries: DimGroup) -> float:
        """Return the seconds of the largest part of a call, beyond those of a share.

        A rank may compute again what all of the entries of a known mixer read.
        """
        work, ranks = self._of_work(node), self._ctx.ranks
        if is_mixer(node) and not entries.dims.keys() >= {
            x for x in node.all_input_nodes if x in self._sequence.tokens.dims
        }:
            return self._of_work(node, entries) - work / ranks
        return self._prices.uneven(work, entries.entries)

    def _of_work(self, node: fx.Node, entries: DimGroup | None = None) -> float:
        """Return the seconds of a call in full; given entries, of a rank's part of it.

        Its memory is read and written once; of a mixer that is kept whole we know more.
        """
        prices = self._prices
        if is_mixer(node):
            call = mixer_call(node)
            operands = {
                name: self._part_of(x, entries)
                for name, x in mixer_operands(node).items()
            }
            work = forward_work(str(call), shapes_of([*operands.values()]))
            if not work.is_counted and call.mixer.shape is not None:
                shape = call.mixer.shape(operands)
                return prices.runs * shape.forward_seconds(prices.profile)
            return prices.computed(work.flops, work.bytes)
        return prices.computed(0.0, sum(map(bytes_of, (node, *node.all_input_nodes))))

    def _part_of(self, node: fx.Node, entries: DimGroup | None) -> Tensor:
        """Return a value without data; given entries, the first rank's part of them."""
        value: Tensor = fake_value(node)
        dim = None if entries is None else entries.dims.get(node)
        if dim is None:
            return value
        sizes = list(value.shape)
        sizes[dim.dim] = -(-sizes[dim.dim] // self._ctx.ranks)
        return value.new_empty(sizes)


def _reads_entries(node: fx.Node, entries: DimGroup, computed: set[fx.Node]) -> bool:
    """Tell whether a call reads a value of which ranks have entries, or makes one.

    Weights that are cut share nothing out: every rank has all of them.
    """
    made = (node, *node.all_input_nodes)
    if any(spelled(x) in CREATIONS and x in entries.dims for x in made):
        return True
    return any(
        x in entries.dims or not isinstance(fake_value(x), Tensor) for x in computed
    )


def bytes_of(node: fx.Node) -> float:
    """Return the bytes of a value over all ranks; what is no tensor has none."""
    value = fake_value(node)
    if not isinstance(value, Tensor):
        return 0.0
    return math.prod(expected_shape(value)) * value.element_size()


def _uses_other_axes(ctx: Context) -> bool:
    """Tell whether inputs are split on other axes than that of the sequence."""
    return any(
        not placement.is_replicate()
        for given in ctx.inputs.values()
        for axis, placement in enumerate(given.placements)
        if axis != ctx.axis
    )
