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

from cpcompile.apps.calibration import measure_compute, measure_links
from cpcompile.apps.calibration.fit_compute import host_bound_seconds
from cpcompile.apps.calibration.fit_profile import fit_profile
from cpcompile.apps.calibration.samples import (
    MessageSample,
    OverlapSample,
    Samples,
    TimedExchange,
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
    kernels = measure_compute.measure_kernels(watch, effort.kernels, effort.long)
    merges, backward_merges = measure_compute.measure_merges(watch, effort.merges)
    copies = measure_compute.measure_copies(watch, effort.copies)
    launches = measure_compute.measure_launches(watch, effort.copies / 4)
    alone = measure_compute.measure_alone_speedup(watch, effort.copies)
    messages: tuple[MessageSample, ...] = ()
    overlaps: tuple[OverlapSample, ...] = ()
    if watch.group.size() > 1:
        messages = _messages(watch, effort)
        overlaps = measure_links.measure_overlap(watch, watch.group, effort.overlap)
    return Samples(
        kernels=kernels,
        copies=copies,
        merges=merges,
        backward_merges=backward_merges,
        launches=launches,
        messages=messages,
        overlaps=overlaps,
        alone_speedup=alone,
        speeds=measure_compute.measure_speeds(watch, effort.copies),
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


def _messages(watch: Stopwatch, effort: Effort) -> tuple[MessageSample, ...]:
    sizes = measure_links.SIZES + (measure_links.LONG_SIZES if effort.long else ())
    size, near = watch.group.size(), ranks_per_node(watch.group)
    ranks = dist.get_process_group_ranks(watch.group)
    samples: tuple[MessageSample, ...] = ()
    if near == size:
        whole = measure_links.measure_messages
        samples += whole(watch, watch.group, effort.messages, sizes)
        if size > 2 and size % 2 == 0:
            pairs = _my_group(
                watch.group, [ranks[i : i + 2] for i in range(0, size, 2)]
            )
            small = [x for x in sizes if x <= measure_links.SMALL]
            samples += whole(
                watch,
                pairs,
                effort.small_groups,
                small,
                kinds=[k for k in TimedExchange if k is not TimedExchange.HOP],
            )
        return samples + _shared(watch, size, effort, sizes)
    nodes = _my_group(watch.group, [ranks[i : i + near] for i in range(0, size, near)])
    samples += measure_links.measure_messages(watch, nodes, effort.messages, sizes)
    across = _my_group(watch.group, [ranks[i::near] for i in range(near)])
    idle = watch.group.rank() % near > 0
    for senders in (1, near):
        samples += measure_links.measure_messages(
            watch,
            across,
            effort.small_groups / 2,
            sizes,
            kinds=[TimedExchange.HOP],
            senders=senders,
            idle=senders == 1 and idle,
        )
    return samples + _shared(watch, near, effort, sizes)


def _shared(
    watch: Stopwatch, near: int, effort: Effort, sizes: Sequence[int]
) -> tuple[MessageSample, ...]:
    """Time large all-to-alls in groups of 2, 4, ... of the `near` ranks of a node.

    All groups exchange at once, which shows which ranks share a host bridge.
    """
    size, ranks = watch.group.size(), dist.get_process_group_ranks(watch.group)
    groups = [2**i for i in range(1, near.bit_length()) if 2**i < near]
    samples: tuple[MessageSample, ...] = ()
    for count in groups:
        if near % count:
            continue
        all_ranks = [ranks[i : i + count] for i in range(0, size, count)]
        samples += measure_links.measure_messages(
            watch,
            _my_group(watch.group, all_ranks),
            effort.small_groups / len(groups),
            [x for x in sizes if x > measure_links.SMALL],
            kinds=[TimedExchange.ALL_TO_ALL],
        )
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
    if device.type != "cpu":
        issue = host_bound_seconds(samples.kernels)
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
