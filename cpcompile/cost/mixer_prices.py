"""Seconds of every way to share a call that mixes tokens, from its sizes.

Passes on graphs and plans of a model's sizes compute by these formulas. All seconds are
beyond those of an even share of the work, and those of the slowest rank.

    exchange   all-to-alls of operands and results
               + work of heads that are not dealt out evenly
    states     again / ranks * work + one all-gather of states per pass
    gather     all-gathers of operands + (1 - 1 / ranks) * work
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.relayout_cost import relayout_seconds

BYTES_OF_STATES = 4  # mixers compute in float32, whatever their operands are
WORK_OF_A_STEP = 3  # the backward computes the gradients of both operands of products


@dataclass(frozen=True)
class Summary:
    """What a rank tells others of its tokens, s' = A s + B.

    part, decay: bytes of B and A. again: runs of the function that this takes.
    """

    part: float
    decay: float
    again: float

    @classmethod
    def of_state(
        cls, shape: Sequence[int], rows: int | None, columns: int | None
    ) -> Summary:
        """Return the summary of a state.

        Args:
            shape: of the state. rows: its dimension that A mixes; None if A is one
                number per entry. columns: its dimension that the values have.
        """
        part = math.prod(shape) * BYTES_OF_STATES
        if rows is None or columns is None:
            return cls(part, part, 2.0)  # from zero, and from ones with no values
        ratio = shape[rows] / shape[columns]  # one run, with as many more columns
        return cls(part, part * ratio, 1 + ratio)


@dataclass(frozen=True)
class MixerPrices:
    """The prices on so many ranks of a machine.

    runs: of the work of a forward. passes: how often values are sent.
    """

    profile: HardwareProfile
    ranks: int
    runs: int
    passes: int

    @classmethod
    def of_training(
        cls, profile: HardwareProfile, ranks: int, backward: bool
    ) -> MixerPrices:
        """Return the prices of a forward, and of a backward: gradients travel back."""
        return cls(
            profile, ranks, WORK_OF_A_STEP if backward else 1, 2 if backward else 1
        )

    def ways(
        self,
        work: float,
        operands: Iterable[float],
        summary: Summary | None,
        exchanges: Iterable[float] = (),
    ) -> dict[MixerStrategy, float]:
        """Return the seconds of every strategy that is possible for a call.

        Args:
            work: seconds of all of it on one device. operands: bytes of those that have
                tokens. summary: None if no states can be passed on.
            exchanges: seconds of an exchange for each dimension that is possible.
        """
        gathered = self.gathered(operands)
        found = {MixerStrategy.GATHER: gathered + (1 - 1 / self.ranks) * work}
        if summary is not None:
            nbytes = (summary.part + summary.decay) * self.ranks
            sent = self.passes * relayout_seconds(self.profile, self.ranks, nbytes)
            found[MixerStrategy.STATES] = summary.again * work / self.ranks + sent
        cheapest = min(exchanges, default=None)
        if cheapest is not None:
            found[MixerStrategy.EXCHANGE] = cheapest
        return found

    def computed(self, flops: float, nbytes: float) -> float:
        """Return the seconds of a function in float32 for all tokens.

        Args:
            flops, nbytes: of the forward; bytes are read or written.
        """
        profile = self.profile
        rate = profile.forward_flops_per_second * profile.speed(BYTES_OF_STATES)
        return self.runs * (flops / rate + nbytes / profile.memory_bytes_per_second)

    def uneven(self, work: float, entries: int) -> float:
        """Return the seconds of a rank that has one entry more than others."""
        return (-(-entries // self.ranks) / entries - 1 / self.ranks) * work

    def gathered(self, sizes: Iterable[float]) -> float:
        """Return the seconds to gather values of so many bytes, over all ranks."""
        return math.fsum(  # the same on every rank, in whatever order
            self.passes * relayout_seconds(self.profile, self.ranks, nbytes)
            for nbytes in sizes
        )

    def exchanged(self, nbytes: float, is_graded: bool = True) -> float:
        """Return the seconds to exchange a value of so many bytes, over all ranks.

        is_graded: whether its gradient travels back.
        """
        passes = self.passes if is_graded else 1
        return passes * relayout_seconds(self.profile, self.ranks, nbytes / self.ranks)
