"""Find how long each attention call took, from what the ranks have recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpcompile.reporting.tracing.events import (
    ATTENTION,
    BACKWARD,
    FORWARD,
    GATHERS,
    WAITS,
    Event,
    direction,
)


@dataclass(frozen=True)
class Measured:
    """The times of one attention call, forward and backward, on the slowest rank.

    exposed_seconds: seconds in which a rank waited for messages or collectives.
    """

    seconds: float
    exposed_seconds: float


def measured(ranks: Sequence[Sequence[Event]], calls: int) -> list[Measured] | None:
    """Return the times of all attention calls, in the order of the forward.

    Return None if a rank ran another number than `calls`, as where a checkpoint runs
    some twice.
    """
    by_rank = [_on_rank(events, calls) for events in ranks]
    if not by_rank or any(x is None for x in by_rank):
        return None
    return [
        Measured(max(s for s, _ in call_times), max(w for _, w in call_times))
        for call_times in zip(*(x for x in by_rank if x is not None), strict=True)
    ]


def _on_rank(events: Sequence[Event], calls: int) -> list[tuple[float, float]] | None:
    attention = [x for x in events if x.lane == ATTENTION]
    forward = [x for x in attention if direction(x) == FORWARD]
    backward = [x for x in attention if direction(x) == BACKWARD][::-1]
    if len(forward) != calls or len(backward) not in (0, calls):
        return None
    halves = zip(forward, backward, strict=True) if backward else zip(forward)
    waits = [x for x in events if x.lane in (WAITS, GATHERS)]
    return [_sums(list(half), waits) for half in halves]


def _sums(parts: list[Event], waits: list[Event]) -> tuple[float, float]:
    inside = [w for w in waits if any(part.holds(w) for part in parts)]
    alone = [w for w in inside if not any(o is not w and o.holds(w) for o in inside)]
    seconds = sum(x.duration for x in parts) / 1e6
    return seconds, sum(x.duration for x in alone) / 1e6
