"""Runs a function on fresh gloo ranks of one thread, and hands on what it finds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.progress import Event


def in_processes(ranks: int, target: Any, *args: Any) -> Iterator[Event]:
    """Run `target(put, *args)` on fresh gloo ranks; yields what rank 0 puts."""
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    # The parent holds the store, so its port is free for sure.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        spawn.Process(target=serve, args=(rank, ranks, store.port, queue, target, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while (item := queue.get(timeout=300)) is not None:
        yield item
    for rank, process in enumerate(processes):
        process.join()
        if process.exitcode:
            raise SystemExit(f"rank {rank} of {ranks} ended with {process.exitcode}")


def serve(
    rank: int, ranks: int, port: int, queue: Any, target: Any, args: tuple[Any, ...]
) -> None:
    """The main function of one rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        target(queue.put if rank == 0 else lambda item: None, *args)
        dist.barrier()
    finally:
        if rank == 0:
            queue.put(None)
    dist.destroy_process_group()
