"""Find where along a size the decision changes: crossovers of the cost expressions.

A decision is a function of integers, so a crossover is found by evaluating `choose` on
a geometric grid and bisecting where two neighbours decide differently. It therefore
respects ties, memory budgets and exclusions, which the expressions alone do not know.
A decision that holds only between two grid points is not seen.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from cpcompile.cost.plans import Candidate, Plan, Workload
from cpcompile.errors import RewriteError

GRID_FACTOR = 2**0.25
LONGEST = 2**31


@dataclass(frozen=True)
class Interval:
    """Sizes low <= size < high for which one candidate is chosen, or none can be."""

    low: int
    high: int
    label: str | None


def region(
    decide: Callable[[int], Plan], size: int, low: int = 1, high: int = LONGEST
) -> Interval:
    """Return the sizes around `size` for which `decide` chooses as it does there.

    Args:
        decide: the plan of a size; RewriteError means that there is none.
        size: inside of [low, high).
    """
    chosen = _form(decide, size)

    def same(other: int) -> bool:
        return _form(decide, other) == chosen

    return Interval(
        low=_edge(same, size, low),
        high=_edge(same, size, high - 1) + 1,
        label=None if chosen is None else chosen.label,
    )


def regions(decide: Callable[[int], Plan], low: int, high: int) -> list[Interval]:
    """Return all decisions in [low, high), in order, without gaps."""
    intervals, start = [], low
    while start < high:
        intervals.append(region(decide, start, start, high))
        start = intervals[-1].high
    return intervals


def _edge(same: Callable[[int], bool], start: int, limit: int) -> int:
    """Return the last size from `start` towards `limit`, inclusive, that is the same.

    Towards a smaller limit this is the smallest such size.
    """
    sign, inside = (1 if limit > start else -1), start
    while inside != limit:
        far = abs(round(inside * GRID_FACTOR**sign) - inside)
        step = min(max(far, 1), abs(limit - inside))
        if not same(inside + sign * step):
            places = range(inside, inside + sign * (step + 1), sign)
            return places[bisect_left(places, True, key=lambda x: not same(x)) - 1]
        inside += sign * step
    return inside


def with_length(workload: Workload, q_len: int) -> Workload:
    """Return the same call at another length; keys keep their ratio to the queries."""
    kv_len = max(1, workload.kv_len * q_len // workload.q_len)
    return replace(workload, q_len=q_len, kv_len=kv_len)


def _form(decide: Callable[[int], Plan], size: int) -> Candidate | None:
    """Return what is decided, without what it costs; None if nothing can be."""
    try:
        chosen = decide(size).chosen
    except RewriteError:
        return None
    where = (chosen.strategy, chosen.degrees, chosen.layout)
    return Candidate(*where, head_groups=chosen.head_groups)
