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


def passes_of(backward: bool) -> int:
    """Return how often values are sent: gradients travel back."""
    return 2 if backward else 1


def summary_of(shape: Sequence[int], rows: int | None, columns: int | None) -> Summary:
    """Return the summary of a state.

    Args:
        shape: of the state. rows: its dimension that A mixes; None if A is one number
            per entry. columns: its dimension that the values have.
    """
    part = math.prod(shape) * BYTES_OF_STATES
    if rows is None or columns is None:
        return Summary(part, part, 2.0)  # from zero, and from ones with no values
    ratio = shape[rows] / shape[columns]  # one run, with as many more columns
    return Summary(part, part * ratio, 1 + ratio)


def work_seconds(
    profile: HardwareProfile, flops: float, nbytes: float, backward: bool
) -> float:
    """Return the seconds of a function in float32 for all tokens.

    Args:
        flops, nbytes: of the forward; bytes are read or written.
    """
    rate = profile.forward_flops_per_second * profile.speed(BYTES_OF_STATES)
    passes = WORK_OF_A_STEP if backward else 1
    return passes * (flops / rate + nbytes / profile.memory_bytes_per_second)


def repeated_seconds(work: float, ranks: int) -> float:
    """Return the seconds of a call on every rank, beyond those of a share."""
    return (1 - 1 / ranks) * work


def uneven_seconds(work: float, entries: int, ranks: int) -> float:
    """Return the seconds of a rank that has one entry more than others."""
    return (-(-entries // ranks) / entries - 1 / ranks) * work


def gathered_seconds(
    profile: HardwareProfile, ranks: int, sizes: Iterable[float], passes: int
) -> float:
    """Return the seconds to gather values of so many bytes, over all ranks."""
    return math.fsum(  # the same on every rank, in whatever order
        passes * relayout_seconds(profile, ranks, nbytes) for nbytes in sizes
    )


def exchanged_seconds(
    profile: HardwareProfile, ranks: int, nbytes: float, passes: int
) -> float:
    """Return the seconds to exchange a value of so many bytes, over all ranks."""
    return passes * relayout_seconds(profile, ranks, nbytes / ranks)


def states_seconds(
    profile: HardwareProfile, ranks: int, summary: Summary, work: float, passes: int
) -> float:
    """Return the seconds to make summaries, and to pass them on."""
    nbytes = (summary.part + summary.decay) * ranks
    gathered = relayout_seconds(profile, ranks, nbytes)
    return summary.again * work / ranks + passes * gathered
