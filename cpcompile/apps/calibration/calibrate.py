"""Measure the running machine and group on all ranks together, and fit a profile.

`cpcompile calibrate` does so under torchrun, or on CPU processes that it starts itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.run import main as torchrun

from cpcompile.apps.calibration.fit_profile import Samples, TimedExchange, fit_profile
from cpcompile.apps.calibration.measure import Effort, measure, ranks_per_node
from cpcompile.apps.calibration.stopwatch import Stopwatch
from cpcompile.cost.hardware.profile import (
    HardwareProfile,
    parse_profile,
    profile_text,
    require_no_link,
    write_profile,
)
from cpcompile.cost.hardware.selection import calibrated_path, shipped_profile

FULL = Effort(24.0, 6.0, 2.0, 18.0, 6.0, 8.0, long=True)
_ON_CPU = "CPCOMPILE_CALIBRATES_CPU"  # set for processes of --ranks
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


def main(arguments: Sequence[str]) -> int:
    """Calibrate as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="cpcompile calibrate",
        description="Measure this machine, so that the choice of strategies fits it. "
        "Run it as the model will run: torchrun --nproc-per-node 4 -m cpcompile "
        "calibrate; or let it start processes on the CPU with --ranks.",
    )
    parser.add_argument("--ranks", type=int, help="start so many CPU processes (gloo)")
    parser.add_argument("--quick", action="store_true", help="15 s instead of 75 s")
    parser.add_argument("--output", type=Path, help="FILE.json instead of the cache")
    options = parser.parse_args(arguments)
    if options.output is not None:
        try:  # now, not after minutes of measuring
            require_no_link(options.output)
        except ValueError as error:
            parser.error(f"--output: {error}")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if options.output is not None and options.output.suffix != ".json":
        parser.error(f"--output is {options.output}; needed a name that ends in .json")
    if launched and options.ranks is not None:
        parser.error("--ranks starts processes, but torchrun already has: leave it out")
    if launched:
        _on_launched_rank(options.quick, options.output)
        return 0
    if options.ranks is None:
        parser.error(
            "there is no group to measure: start it by torchrun --nproc-per-node N -m "
            "cpcompile calibrate, or give --ranks N to measure N CPU processes"
        )
    if options.ranks < 2:
        parser.error(f"--ranks is {options.ranks}; needed 2 or more")
    own = ["--quick"] * options.quick
    own += [] if options.output is None else ["--output", str(options.output)]
    how = ["--standalone", f"--nproc-per-node={options.ranks}", "-m", "cpcompile"]
    os.environ |= {_ON_CPU: "1", "OMP_NUM_THREADS": "1"}
    torchrun([*how, "calibrate", *own])
    return 0


def _on_launched_rank(quick: bool, output: Path | None) -> None:
    """Calibrate in a process that torchrun has started."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or _ON_CPU in os.environ:
        device = torch.device("cpu")
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device.type)
    _measure_and_write(device, quick, output, backend)


def _measure_and_write(
    device: torch.device, quick: bool, output: Path | None, backend: str
) -> None:
    """Calibrate in a group of all ranks."""
    dist.init_process_group(backend)
    try:
        assert dist.group.WORLD is not None, "the process group is initialised"
        profile = calibrate(dist.group.WORLD, device, QUICK if quick else FULL)
        if dist.get_rank() == 0:
            path = output or calibrated_path(device.type, dist.get_world_size())
            write_profile(profile, path)
            lines = [f"  {name}: {text}" for name, text in profile.about.items()]
            print("\n".join([f"wrote {path}", *lines]))
        dist.barrier()
    finally:
        dist.destroy_process_group()
