"""Price the calls and values of a graph on either side, by cost/mixer_prices.py."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch.fx as fx
from torch import Tensor

from cpcompile.cost import mixer_prices
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.ops.mixers.mixer_work import forward_work, shapes_of
from cpcompile.ops.mixers.state_passing import passes_states

from ...graph.calls import spelled
from ...graph.context import Context
from ...graph.mixer_calls import is_mixer, mixer_call, mixer_operands
from ...graph.nodes import expected_shape, fake_value
from ...graph.sequence_tokens import TokenDim
from ...placement.scan_calls import joined_operands
from ..normalize.pad_convolutions import convolved
from .dim_class import CREATIONS, DimClass
from .mixed_sequence import MixedSequence, dim_size

DEAR = 1e6  # seconds: a price for what the user has ruled out
Prices = dict[MixerStrategy, float]


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
        self._passes = mixer_prices.passes_of(ctx.backward)
        self.is_laid_out = bool(ctx.findings.balanced_plans)

    def of_strategies(self, node: fx.Node) -> Prices:
        """Return the seconds of every strategy that is possible for a call."""
        prices, dims = self._on_tokens(node), self._sequence.tokens.dims
        values = [x for x in (*node.all_input_nodes, *node.users) if x in dims]
        exchanges = [
            self.in_uneven_parts(node, entries)
            + math.fsum(self._on_entries(x, entries) for x in values)
            for entries in self._sequence.classes_of(node)
        ]
        if exchanges:
            prices[MixerStrategy.EXCHANGE] = min(exchanges)
        return prices

    def on_tokens(self, node: fx.Node) -> tuple[float, MixerStrategy]:
        """Return the seconds of a call on the side of the tokens, and how."""
        prices = self._on_tokens(node)
        forced = self._ctx.mixer_strategy
        if forced in prices:
            prices = {forced: prices[forced]}
        strategy = min(prices, key=lambda x: (prices[x], x.value))
        dear = forced is MixerStrategy.EXCHANGE
        return (DEAR if dear else prices[strategy]), strategy

    def _on_tokens(self, node: fx.Node) -> Prices:
        operands = [x for x in node.all_input_nodes if x in self._sequence.tokens.dims]
        prices = {MixerStrategy.GATHER: self.of_gather(operands) + self.in_full(node)}
        states = self.of_states(node)
        if states is not None:
            prices[MixerStrategy.STATES] = states
        return prices

    def _on_entries(self, node: fx.Node, entries: DimClass) -> float:
        """Return the seconds to move a value; what all entries read is gathered."""
        return self._exchanged(node) if node in entries.dims else self.of_gather([node])

    def of_states(self, node: fx.Node) -> float | None:
        """Return the seconds of passing on states; None where that is impossible."""
        ranks = self._ctx.ranks
        if _uses_other_axes(self._ctx) or leaves_ranks_empty(
            self._sequence.tokens.entries, ranks
        ):
            return None
        joined = joined_operands(node)
        summary = self._of_steps(joined) if joined else self._of_state(node)
        if summary is None:
            return None
        work = self.of_work(node)
        return mixer_prices.states_seconds(
            self._ctx.profile, ranks, summary, work, self._passes
        )

    def _of_steps(self, joined: Iterable[fx.Node]) -> mixer_prices.Summary | None:
        """Return the summary of an associative scan: what its last step gives."""
        dims = self._sequence.tokens.dims
        if any(dims.get(x) != TokenDim(0) for x in joined):
            return None
        last = math.fsum(map(bytes_of, joined)) / self._sequence.tokens.entries
        return mixer_prices.Summary(last, 0.0, 1.0)  # one step more for every result

    def _of_state(self, node: fx.Node) -> mixer_prices.Summary | None:
        """Return the summary of a known mixer; None if it passes on no states."""
        call, operands = mixer_call(node), mixer_operands(node)
        state = call.mixer.state
        if state is None or not passes_states(call):
            return None
        tokens = call.mixer.tokens
        if any(
            self._sequence.tokens.dims.get(x) != TokenDim(tokens[name])
            for name, x in operands.items()
            if name in tokens
        ):
            return None
        values = {name: fake_value(x) for name, x in operands.items()}
        shape = expected_shape(call.with_final_state().empty_state(values))
        return mixer_prices.summary_of(shape, state.rows, state.columns)

    def of_gather(self, operands: Iterable[fx.Node]) -> float:
        """Return the seconds to gather values, and their gradients."""
        return mixer_prices.gathered_seconds(
            self._ctx.profile, self._ctx.ranks, map(bytes_of, operands), self._passes
        )

    def of_move(self, node: fx.Node) -> float:
        """Return the seconds of a call that moves few tokens, or picks few."""
        if all(spelled(user) in CREATIONS for user in node.users):
            return 0.0  # nobody reads its numbers, so that nothing is sent
        tokens = self._sequence.tokens.entries
        moved = 0.0
        for size in filter(None, map(bytes_of, node.all_input_nodes)):
            others = abs(1 - bytes_of(node) / size) * tokens  # at one of the ends
            moved = max(moved, size / tokens * min(max(others, 1), tokens / 2))
        return mixer_prices.exchanged_seconds(
            self._ctx.profile, self._ctx.ranks, moved, self._passes
        )

    def of_halo(self, node: fx.Node) -> float:
        """Return the seconds to borrow what a convolution reads beside a rank's own."""
        operands, borrowed = convolved(node), self._sequence.borrowed(node)
        if operands is None or not borrowed:
            return 0.0
        part = min(1.0, borrowed / self._sequence.tokens.entries)
        return mixer_prices.gathered_seconds(
            self._ctx.profile,
            self._ctx.ranks,
            [part * bytes_of(operands[0])],
            self._passes,
        )

    def of_exchange(self, node: fx.Node, entries: DimClass) -> float | None:
        """Return the seconds to exchange a value; None if it cannot be exchanged."""
        tokens = self._sequence.tokens
        token_dim, dim = tokens.dims.get(node), entries.dims.get(node)
        if token_dim is None and self._sequence.is_of_others(node):
            return None
        if dim is not None and token_dim is None and dim.outer == 1:
            return self.of_gather([node])  # as a last state, which has no tokens
        if token_dim is None or dim is None or token_dim.dim == dim.dim:
            return None
        if token_dim.outer > 1 or dim.outer > 1 or self._sequence.is_written(node):
            return None
        if dim_size(node, token_dim) != tokens.entries:
            return None
        if dim_size(node, dim) != entries.entries and entries.entries % self._ctx.ranks:
            return None  # a rank's part would begin inside of an entry
        return self._exchanged(node)

    def _exchanged(self, node: fx.Node) -> float:
        graded = self._ctx.backward and fake_value(node).requires_grad
        return mixer_prices.exchanged_seconds(
            self._ctx.profile,
            self._ctx.ranks,
            bytes_of(node),
            mixer_prices.passes_of(graded),
        )

    def in_full(self, node: fx.Node) -> float:
        """Return the seconds of a call on every rank, beyond those of a share."""
        return mixer_prices.repeated_seconds(self.of_work(node), self._ctx.ranks)

    def in_uneven_parts(self, node: fx.Node, entries: DimClass) -> float:
        """Return the seconds of the largest part of a call, beyond those of a share.

        A rank may compute again what all of the entries of a known mixer read.
        """
        work, ranks = self.of_work(node), self._ctx.ranks
        if is_mixer(node) and not entries.dims.keys() >= {
            x for x in node.all_input_nodes if x in self._sequence.tokens.dims
        }:
            return self.of_work(node, entries) - work / ranks
        return mixer_prices.uneven_seconds(work, entries.entries, ranks)

    def of_work(self, node: fx.Node, entries: DimClass | None = None) -> float:
        """Return the seconds of a call in full; given entries, of a rank's part of it.

        Its memory is read and written once; of a mixer that is kept whole we know more.
        """
        profile, backward = self._ctx.profile, self._ctx.backward
        if is_mixer(node):
            call = mixer_call(node)
            operands = {
                name: self._part_of(x, entries)
                for name, x in mixer_operands(node).items()
            }
            work = forward_work(str(call), shapes_of([*operands.values()]))
            if not work.is_counted and call.mixer.shape is not None:
                runs = mixer_prices.WORK_OF_A_STEP if backward else 1
                shape = call.mixer.shape(operands)
                return runs * shape.forward_seconds(profile)
            return mixer_prices.work_seconds(profile, work.flops, work.bytes, backward)
        sizes = map(bytes_of, (node, *node.all_input_nodes))
        passes = 3 if backward else 1
        return passes * sum(sizes) / profile.memory_bytes_per_second

    def _part_of(self, node: fx.Node, entries: DimClass | None) -> Tensor:
        """Return a value without data; given entries, the first rank's part of them."""
        value: Tensor = fake_value(node)
        dim = None if entries is None else entries.dims.get(node)
        if dim is None:
            return value
        sizes = list(value.shape)
        sizes[dim.dim] = -(-sizes[dim.dim] // self._ctx.ranks)
        return value.new_empty(sizes)


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
