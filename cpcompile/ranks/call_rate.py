"""Tell whether a program is called so often that asking other ranks slows it down."""

from __future__ import annotations

import time

# The share of the time between calls that meetings may take.
_SHARE = 0.005


class CallRate:
    """The time that meetings take, and the time between the calls of a program."""

    def __init__(self) -> None:
        self.calls = 0
        self.is_quick = False
        self._third = 0.0
        self._shortest = float("inf")

    def add(self, start: float, end: float) -> None:
        """Note a meeting that lasted from start to end."""
        self.calls += 1
        self._shortest = min(self._shortest, end - start)
        if self.calls == 3:  # the first ones compile, or wait for what does
            self._third = start

    def seems_quick(self) -> bool:
        """Tell whether two meetings a call, forward and backward, take too long."""
        interval = (time.perf_counter() - self._third) / max(self.calls - 2, 1)
        return 2 * self._shortest > _SHARE * interval
