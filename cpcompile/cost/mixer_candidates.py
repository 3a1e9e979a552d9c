"""Price the strategies for a sequence mixer of a given shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cpcompile.cost import mixer_prices
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_shape_plan import MixerCandidate
from cpcompile.cost.mixer_shapes import KernelWork, MixerKind, MixerShape, TokenValue
from cpcompile.cost.plans import Direction
from cpcompile.geometry.layout import Chunks, leaves_ranks_empty

_STEP = mixer_prices.WORK_OF_A_STEP
RUNS = {Direction.FORWARD: 1, Direction.BACKWARD: _STEP - 1, Direction.BOTH: _STEP}
"""How often the work of a forward is done."""
_CHANNELS = "value channels"
_ONE_RANK = "one rank has all tokens"


@dataclass(frozen=True)
class MixerOnRanks:
    """A mixer that so many ranks share.

    kernel: what is taken to compute it.
    """

    shape: MixerShape
    profile: HardwareProfile
    ranks: int
    direction: Direction
    kernel: KernelWork

    @property
    def work(self) -> float:
        """Seconds of all of it on one device, in this direction."""
        forward = self.shape.forward_seconds(self.profile, self.kernel)
        return RUNS[self.direction] * forward

    def exchange(self) -> MixerCandidate:
        """Price the exchange of tokens for heads, or for rows of a batch.

        Or for the channels of values, if neither is dealt out evenly: every rank reads
        what is not of values, and computes again what is made of that alone.
        """
        shape, ranks = self.shape, self.ranks
        if ranks == 1:
            return MixerCandidate(MixerStrategy.EXCHANGE, excluded=_ONE_RANK)
        heads = "channels" if shape.kind is MixerKind.MAMBA else "heads"
        reasons = {heads: self._too_few_heads(heads), "batch": ""}
        if leaves_ranks_empty(shape.batch, ranks):
            reasons["batch"] = f"batch {shape.batch} leaves one rank without a row"
        entries = {heads: shape.entries, "batch": shape.batch}
        even = [x for x in reasons if not reasons[x] and entries[x] % ranks == 0]
        if shape.kind is not MixerKind.MAMBA and not even:
            entries[_CHANNELS], reasons[_CHANNELS] = shape.value_dim, ""
            if leaves_ranks_empty(shape.value_dim, ranks):
                reasons[_CHANNELS] = (
                    f"{shape.value_dim} {_CHANNELS} leave one rank without any"
                )
        possible = [
            self._exchanged(dim, entries[dim])
            for dim, reason in reasons.items()
            if not reason
        ]
        if possible:
            return min(possible, key=lambda c: c.seconds or 0.0)
        text = "; ".join(reasons.values())
        return MixerCandidate(MixerStrategy.EXCHANGE, excluded=text)

    def states(self) -> MixerCandidate:
        """Price passing on states, whose bytes do not depend on the tokens."""
        shape, ranks, reason = self.shape, self.ranks, None
        state = shape.state
        if ranks == 1:
            reason = _ONE_RANK
        elif state is None:
            reason = f"functions of {shape.kind.value} take no state to begin with"
        elif leaves_ranks_empty(shape.tokens, ranks):
            reason = f"{shape.tokens} tokens leave one of {ranks} ranks without any"
        if state is None or reason is not None:
            return MixerCandidate(MixerStrategy.STATES, excluded=reason)
        summary = mixer_prices.summary_of(*state)
        beyond = mixer_prices.states_seconds(
            self.profile, ranks, summary, self.work, self._passes
        )
        received = {  # the backward gathers gradients of two states
            Direction.FORWARD: summary.part + summary.decay,
            Direction.BACKWARD: 2 * summary.part,
            Direction.BOTH: 3 * summary.part + summary.decay,
        }[self.direction]
        return self._candidate(MixerStrategy.STATES, beyond, (ranks - 1) * received)

    def gather(self) -> MixerCandidate:
        """Price the call on every rank."""
        shape, ranks = self.shape, self.ranks
        sizes = [shape.nbytes(x) for x in shape.operands] if ranks > 1 else []
        beyond = mixer_prices.repeated_seconds(self.work, ranks)
        beyond += mixer_prices.gathered_seconds(
            self.profile, ranks, sizes, self._passes
        )
        received = 0.0
        if self._goes_forward:
            received += sum(sizes) * self._gathered_part
        if self._goes_backward:  # of the result alone: gradients are of all tokens
            received += shape.nbytes(shape.result) * self._gathered_part
        return self._candidate(MixerStrategy.GATHER, beyond, received)

    def _exchanged(self, dim: str, entries: int) -> MixerCandidate:
        """Price an exchange along a dimension of so many entries."""
        shape, profile, ranks = self.shape, self.profile, self.ranks
        beyond = [self._of_largest_part(dim, entries) - self.work / ranks]
        received = 0.0
        for value in (*shape.operands, shape.result):
            nbytes, passes = shape.nbytes(value), self._passes
            if self._is_read_by_all(value, dim, entries):
                sizes = [nbytes]
                beyond.append(
                    mixer_prices.gathered_seconds(profile, ranks, sizes, passes)
                )
                received += passes * nbytes * self._gathered_part
            else:
                beyond.append(
                    mixer_prices.exchanged_seconds(profile, ranks, nbytes, passes)
                )
                received += nbytes * self._received_part(value, entries)
        strategy = MixerStrategy.EXCHANGE
        return self._candidate(strategy, math.fsum(beyond), received, dim)

    def _is_read_by_all(self, value: TokenValue, dim: str, entries: int) -> bool:
        """Tell whether all entries of a dimension read a value."""
        if dim == _CHANNELS:
            return not value.has_channels
        return dim != "batch" and value.heads == 1 < entries

    def _of_largest_part(self, dim: str, entries: int) -> float:
        """Return the seconds of the rank that has the most entries.

        It reads all of what all entries read, and may compute with that alone.
        """
        shape, most = self.shape, -(-entries // self.ranks)
        if not any(self._is_read_by_all(x, dim, entries) for x in shape.operands):
            return self.work * most / entries
        part = replace(shape, value_dim=most)
        if dim != _CHANNELS:
            part = replace(shape, value_heads=most, value_dim=shape.entry_dim)
        return replace(self, shape=part).work

    def _received_part(self, value: TokenValue, entries: int) -> float:
        """Return the part of a value that the first rank receives of others."""
        own_tokens = 1 - self._other_tokens
        own_entries = Chunks(entries, self.ranks).count(0) / entries
        to_entries = self._other_tokens * own_entries
        to_tokens = (1 - own_entries) * own_tokens
        if value is self.shape.result:
            to_entries, to_tokens = to_tokens, to_entries
        return to_entries * self._goes_forward + to_tokens * self._goes_backward

    def _too_few_heads(self, name: str) -> str:
        """Return why ranks cannot have heads of their own; "" if they can."""
        shape, ranks = self.shape, self.ranks
        if leaves_ranks_empty(shape.entries, ranks):
            return f"{shape.entries} {name} leave one of {ranks} ranks without any"
        numbers = {x.heads for x in (*shape.operands, shape.result)} - {1}
        if len(numbers) > 1 and any(n % ranks for n in numbers):
            return (
                f"{shape.key_heads} key and {shape.value_heads} value heads are not "
                f"both multiples of {ranks} ranks (repeat keys for every value head)"
            )
        return ""

    def _candidate(
        self, strategy: MixerStrategy, beyond: float, received: float, dim: str = ""
    ) -> MixerCandidate:
        seconds = beyond + self.work / self.ranks
        return MixerCandidate(strategy, dim, seconds, beyond, round(received))

    @property
    def _passes(self) -> int:
        """How often values are sent."""
        return mixer_prices.passes_of(self.direction is Direction.BOTH)

    @property
    def _goes_forward(self) -> bool:
        return self.direction is not Direction.BACKWARD

    @property
    def _goes_backward(self) -> bool:
        return self.direction is not Direction.FORWARD

    @property
    def _other_tokens(self) -> float:
        """The part of the tokens that the first rank does not have."""
        tokens = self.shape.tokens
        return 1 - Chunks(tokens, self.ranks).count(0) / tokens

    @property
    def _gathered_part(self) -> float:
        """The part of a value that an all-gather brings; chunks are padded alike."""
        tokens = self.shape.tokens
        return (self.ranks - 1) * Chunks(tokens, self.ranks).size / tokens
