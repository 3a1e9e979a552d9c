"""Cost of bringing values from one layout to another."""

from __future__ import annotations

from typing import Any

from cpcompile.cost.hardware.links import Group, all_to_all
from cpcompile.cost.hardware.profile import HardwareProfile

COPIES = 2  # tokens are packed for the ranks they go to, and unpacked
MOVED_PER_COPY = 2  # bytes read and written, for each byte


def relaid_seconds(
    nbytes: Any, values: Any, ranks: Any, latency: Any, rate: Any, memory: Any,
    launch: Any,
) -> Any:  # fmt: skip
    """Return the time of all-to-alls of several values, which nothing hides.

    Arguments are numbers, or expressions.

    nbytes: of all values together, on one rank. latency, rate: of an all-to-all.
    memory: bytes per second. launch: seconds of a kernel.
    """
    copies = COPIES * (MOVED_PER_COPY * nbytes / memory + values * launch)
    return values * latency + copies + nbytes * (ranks - 1) / ranks / rate


def relayout_seconds(profile: HardwareProfile, ranks: int, nbytes: float) -> float:
    """Return the time of an all-to-all of one value with `nbytes` bytes per rank."""
    links = all_to_all(profile, Group(ranks))
    memory, launch = profile.memory_bytes_per_second, profile.kernel_launch_seconds
    return float(relaid_seconds(nbytes, 1, ranks, *links, memory, launch))


def reorder_seconds(profile: HardwareProfile, nbytes: float) -> float:
    """Return the time of a copy of a tensor in another order, on every rank."""
    moved = MOVED_PER_COPY * nbytes / profile.memory_bytes_per_second
    return moved + profile.kernel_launch_seconds
