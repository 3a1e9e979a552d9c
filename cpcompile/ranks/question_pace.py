"""Whether a program is called so often that to ask other ranks would slow it down."""

from __future__ import annotations

import time

# What meetings may take of the time between calls.
_SHARE = 0.005


class Pace:
    """How long meetings take, and how long lies between the calls of a program."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_quick = False
        self._third = 0.0
        self._shortest = float("inf")

    def add(self, start: float, end: float) -> None:
        """A meeting lasted from start to end."""
        self.calls += 1
        self._shortest = min(self._shortest, end - start)
        if self.calls == 3:  # the first ones compile, or wait for what does
            self._third = start

    def seems_quick(self) -> bool:
        """Whether two meetings a call, forward and backward, take too long."""
        interval = (time.perf_counter() - self._third) / max(self.calls - 2, 1)
        return 2 * self._shortest > _SHARE * interval
