"""Find stretches of a sequence that are one pattern several times in a row."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RepeatedRun:
    """A stretch of a sequence that repeats after `period` items.

    `ids[i] == ids[i + period]` for start <= i < start + length - period.
    """

    start: int
    length: int
    period: int

    @property
    def count(self) -> int:
        """Number of whole periods."""
        return self.length // self.period

    @property
    def slack(self) -> int:
        """Number of items by which the first of `count` periods may begin later."""
        return self.length % self.period

    @property
    def saved(self) -> int:
        """Number of items that need no other place if one period stands for all."""
        return (self.count - 1) * self.period


def repeats(
    ids: Sequence[int], least_count: int, least_period: int
) -> list[RepeatedRun]:
    """Return the longest stretch of every period, the one that saves most first.

    Only stretches of `least_count` periods or more are returned.
    """
    runs = []
    for period in range(least_period, len(ids) // least_count + 1):
        equal = list(map(operator.eq, ids, ids[period:]))
        if sum(equal) >= (least_count - 1) * period:
            start, length = max(_stretches(equal), key=lambda x: x[1])
            repeat = RepeatedRun(start, length + period, period)
            if repeat.count >= least_count:
                runs.append(repeat)
    return sorted(runs, key=lambda x: (-x.saved, x.period))


def _stretches(equal: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of every stretch of True."""
    start = 0
    for i, same in enumerate([*equal, False]):
        if not same:
            yield start, i - start
            start = i + 1
