"""Measure the running machine and group on all ranks together, and fit a profile."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from cpcompile.apps.calibration.fit import Samples, TimedExchange, fit_profile
from cpcompile.apps.calibration.measure import Effort, measure, ranks_per_node
from cpcompile.apps.calibration.stopwatch import Stopwatch
from cpcompile.cost.hardware.profile import HardwareProfile, parse_profile, profile_text
from cpcompile.cost.hardware.selection import shipped_profile

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
