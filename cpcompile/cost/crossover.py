"""Find where along a size the decision changes: crossovers of the cost expressions.

A decision is a function of integers, so a crossover is found by evaluating `choose` on
a geometric grid and bisecting where two neighbours decide differently. It therefore
respects ties, memory budgets and exclusions, which the expressions alone do not know.
A decision that holds only between two grid points is not seen.
"""

from __future__ import annotations

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
    inside, step = start, GRID_FACTOR if limit > start else 1 / GRID_FACTOR
    while inside != limit:
        next_ = round(inside * step)
        next_ = min(max(next_, inside + 1), limit) if limit > start else next_
        next_ = max(min(next_, inside - 1), limit) if limit < start else next_
        if not same(next_):
            return _bisect(same, inside, next_)
        inside = next_
    return inside


def _bisect(same: Callable[[int], bool], inside: int, outside: int) -> int:
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if same(middle):
            inside = middle
        else:
            outside = middle
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
    return Candidate(
        chosen.strategy,
        chosen.degrees,
        chosen.layout,
        head_groups=chosen.head_groups,
    )
