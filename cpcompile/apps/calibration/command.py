"""`cpcompile calibrate`: under torchrun, or on CPU processes that it starts itself."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpcompile.apps.calibration.calibrate import FULL, QUICK, calibrate
from cpcompile.cost.hardware.profile import require_no_link, write_profile
from cpcompile.cost.hardware.selection import calibrated_path


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
    # This process holds the store, so its port is free for sure.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    serve = (options.ranks, store.port, options.quick, options.output)
    torch.multiprocessing.spawn(_serve, serve, options.ranks, daemon=True)
    return 0


def _on_launched_rank(quick: bool, output: Path | None) -> None:
    """Calibrate in a process that torchrun has started."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        device = torch.device("cpu")
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
    backend = dist.get_default_backend_for_device(device.type)
    _measure_and_write(device, quick, output, backend=backend)


def _serve(rank: int, ranks: int, port: int, quick: bool, output: Path | None) -> None:
    """Calibrate in one process of --ranks, with one thread as torchrun's have."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    group = {"backend": "gloo", "store": store, "rank": rank, "world_size": ranks}
    _measure_and_write(torch.device("cpu"), quick, output, **group)


def _measure_and_write(
    device: torch.device, quick: bool, output: Path | None, **group: Any
) -> None:
    """Calibrate in a group of all ranks, which is made by these arguments."""
    dist.init_process_group(**group)
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
