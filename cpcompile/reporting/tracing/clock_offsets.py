"""Measure how far the clocks of hosts are apart, so that the lanes of a trace fit.

All ranks leave a barrier at about the same time. So the times that two ranks read after
a barrier differ as their clocks do, up to the time that a message takes; the median of
several barriers is taken. Ranks of one host have one clock.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

_BARRIERS = 9


@dataclass(frozen=True)
class Clock:
    """A rank's reading: its host, and the time after each barrier in nanoseconds."""

    host: str
    after_barriers: tuple[int, ...]

    @classmethod
    def read(cls, group: ProcessGroup) -> Clock:
        """Read the clock of this rank; all ranks of the group call it together."""
        times = []
        for _ in range(_BARRIERS):
            dist.barrier(group)
            times.append(time.time_ns())
        return cls(socket.gethostname(), tuple(times))


def ahead(clocks: Sequence[Clock]) -> list[float]:
    """Return by how many microseconds each rank's clock is ahead of the first rank's.

    It is 0 for ranks of the first one's host.
    """
    first = clocks[0]
    by_host: dict[str, list[int]] = {first.host: [0]}
    for clock in clocks:
        if clock.host != first.host:
            pairs = zip(clock.after_barriers, first.after_barriers, strict=True)
            by_host.setdefault(clock.host, []).extend(own - zero for own, zero in pairs)
    return [statistics.median(by_host[clock.host]) / 1e3 for clock in clocks]
