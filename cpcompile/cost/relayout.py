"""What it costs to bring one value of a graph from one layout to another."""

from __future__ import annotations

from cpcompile.cost.hardware import HardwareProfile
from cpcompile.cost.links import Group, all_to_all

COPIES = 2  # tokens are packed for the ranks they go to, and unpacked
MOVED_PER_COPY = 2  # bytes read and written, for each byte


def relayout_seconds(profile: HardwareProfile, ranks: int, nbytes: float) -> float:
    """An all-to-all of a value with so many bytes per rank, which nothing hides."""
    latency, rate = all_to_all(profile, Group(ranks))
    copies = COPIES * reorder_seconds(profile, nbytes)
    return latency + copies + nbytes * (ranks - 1) / ranks / rate


def reorder_seconds(profile: HardwareProfile, nbytes: float) -> float:
    """A copy of a tensor in another order, on every rank."""
    moved = MOVED_PER_COPY * nbytes / profile.memory_bytes_per_second
    return moved + profile.kernel_launch_seconds
