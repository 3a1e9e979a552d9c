"""Measure the running machine and group on all ranks together, and fit a profile."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from cpcompile.apps.calibration.fit import (
    MessageSample,
    Samples,
    TimedExchange,
    fit_profile,
)
from cpcompile.apps.calibration.measure import (
    LONG_SIZES,
    SIZES,
    SMALL,
    measure_alone_speedup,
    measure_copies,
    measure_kernels,
    measure_launch,
    measure_merges,
    measure_messages,
    measure_overlap,
    measure_speeds,
)
from cpcompile.apps.calibration.stopwatch import Stopwatch
from cpcompile.cost.hardware.profile import HardwareProfile, parse_profile, profile_text
from cpcompile.cost.hardware.selection import shipped_profile


@dataclass(frozen=True)
class Effort:
    """Seconds for each kind of measurement, and whether long sequences are measured."""

    kernels: float
    merges: float
    copies: float
    messages: float
    small_groups: float
    overlap: float
    long: bool


FULL = Effort(24.0, 6.0, 2.0, 18.0, 6.0, 8.0, long=True)
QUICK = Effort(4.0, 1.0, 0.5, 3.0, 1.0, 1.0, long=False)


def calibrate(
    group: ProcessGroup, device: torch.device, effort: Effort = FULL
) -> HardwareProfile:
    """Measure this machine for `group`, and return its profile.

    The profile is the same on every rank; all ranks must call this.

    device: of this rank; every rank needs one of the same type.

    Raises: ValueError for a device type that has no shipped profile to start from.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    base = shipped_profile(device.type, name)
    watch = Stopwatch.of(group, device)
    samples = measure(watch, effort)
    text = None
    if group.rank() == 0:
        about = _about(watch, name)
        profile = fit_profile(samples, base, _from_device(watch, samples), about)
        text = profile_text(profile)
    text = watch.from_first_rank(text)
    return parse_profile("calibrated", text, "calibration on the first rank")


def measure(watch: Stopwatch, effort: Effort) -> Samples:
    """Take all samples, on all ranks together."""
    merges, backward_merges = measure_merges(watch, effort.merges)
    several = watch.group.size() > 1
    return Samples(
        kernels=measure_kernels(watch, effort.kernels, effort.long),
        copies=measure_copies(watch, effort.copies),
        merges=merges,
        backward_merges=backward_merges,
        launch=measure_launch(watch, effort.copies / 4),
        messages=_messages(watch, effort) if several else (),
        overlaps=measure_overlap(watch, effort.overlap) if several else (),
        alone_speedup=measure_alone_speedup(watch, effort.copies),
        speeds=measure_speeds(watch, effort.copies),
    )


def ranks_per_node(group: ProcessGroup) -> int:
    """Return the number of consecutive ranks of `group` that are on one node.

    torchrun tells it by LOCAL_WORLD_SIZE. Without a usable number it is all ranks, as
    where every rank has a node to itself: there is one kind of link then.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    size = group.size()
    if not local.isdigit() or not 1 < int(local) < size or size % int(local):
        return size
    return int(local)


def _messages(watch: Stopwatch, effort: Effort) -> list[MessageSample]:
    """Time exchanges of the ranks of a node, in pairs of them, and between nodes.

    Large all-to-alls in groups of 2, 4, ... ranks of a node, all at once, show which
    ranks share a host bridge.
    """
    sizes = SIZES + (LONG_SIZES if effort.long else ())
    small = [x for x in sizes if x <= SMALL]
    large = [x for x in sizes if x > SMALL]
    size, near = watch.group.size(), ranks_per_node(watch.group)
    ranks = dist.get_process_group_ranks(watch.group)
    hop, *collectives = TimedExchange

    def own_group(count: int) -> ProcessGroup:
        return _my_group(
            watch.group, [ranks[i : i + count] for i in range(0, size, count)]
        )

    node = watch.group if near == size else own_group(near)
    samples = measure_messages(watch, node, effort.messages, sizes)
    if near < size:
        across = _my_group(watch.group, [ranks[i::near] for i in range(near)])
        for senders in (1, near):
            idle = senders == 1 and watch.group.rank() % near > 0
            half = effort.small_groups / 2
            samples += measure_messages(
                watch, across, half, sizes, [hop], senders=senders, idle=idle
            )
    elif size > 2 and size % 2 == 0:
        seconds = effort.small_groups
        samples += measure_messages(watch, own_group(2), seconds, small, collectives)
    counts = [2**i for i in range(1, near.bit_length()) if 2**i < near]
    for count in counts:
        if near % count == 0:
            seconds = effort.small_groups / len(counts)
            kinds = [TimedExchange.ALL_TO_ALL]
            samples += measure_messages(watch, own_group(count), seconds, large, kinds)
    return samples


def _my_group(group: ProcessGroup, all_ranks: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create and return the group of this rank, one of the groups in `all_ranks`."""
    mine = dist.get_process_group_ranks(group)[group.rank()]
    (own,) = [list(ranks) for ranks in all_ranks if mine in ranks]
    # Only the members call it: `group` need not be all ranks there are.
    own_group = dist.new_group(own, use_local_synchronization=True)
    assert isinstance(own_group, ProcessGroup), "this rank is a member"
    return own_group


def _from_device(watch: Stopwatch, samples: Samples) -> dict[str, tuple[float, str]]:
    """Return the numbers that need no measurement of their own, with their sources."""
    device, near = watch.device, ranks_per_node(watch.group)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory, where = float(properties.total_memory), "device properties"
        tiles, what = float(properties.multi_processor_count), "multiprocessors"
    else:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory, where = float(pages) / near, "memory of the machine over its ranks"
        threads = torch.get_num_threads()
        tiles, what = (0.0 if threads == 1 else float(threads)), "one thread per tile"
    issue, who = 0.0, "the host computes itself, which merge_latency_seconds counts"
    if not watch.on_cpu:  # the host takes longest for steps that do nearly nothing
        fewest = min(s.pairs for s in samples.kernels)
        issue = max(s.seconds for s in samples.kernels if s.pairs == fewest)
        who = "measured: an attention step of the fewest tokens, which the host bounds"
    node = "LOCAL_WORLD_SIZE" if near < watch.group.size() else "all ranks of the group"
    numbers = {
        "memory_bytes": (memory, where),
        "parallel_tiles": (tiles, what),
        "ranks_per_node": (float(near), node),
        "step_issue_seconds": (issue, who),
    }
    if not any(s.senders for s in samples.messages) and samples.messages:
        # Every link is measured: what is between nodes is what is between ranks.
        hops = [s for s in samples.messages if s.kind is TimedExchange.HOP]
        rate = max(s.sent_bytes / s.seconds for s in hops)
        text = "as the links between ranks, all of which were measured"
        numbers["inter_node_bytes_per_second"] = (rate, text)
        numbers["inter_node_latency_seconds"] = (0.0, text)
        numbers["network_cards_per_node"] = (float(near), "does not matter")
    return numbers


def _about(watch: Stopwatch, device_name: str) -> dict[str, str]:
    loads = watch.foreign_loads
    triton = importlib.util.find_spec("triton") is not None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if triton else "none",
        "python": platform.python_version(),
        "device": device_name or f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "backend": str(dist.get_backend(watch.group)),
        "ranks": str(watch.group.size()),
        "other_processes": (
            f"used {statistics.median(loads):.0%} of the cores meanwhile (median)"
            if watch.shared_clock
            else "not known: the ranks are on several machines"
        ),
    }
