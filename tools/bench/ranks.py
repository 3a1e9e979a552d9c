"""Run a function on fresh gloo ranks of one thread, and hand on what it finds."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.namespaces import Namespace
from tools.bench.progress import Event

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


def in_processes(
    ranks: int, target: Any, *args: Any, ends: Sequence[Namespace] = ()
) -> Iterator[Event]:
    """Run `target(put, *args)` on fresh gloo ranks; yield what rank 0 puts.

    ends: a network namespace for each rank; on loopback without them.
    """
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    address, port, store = "127.0.0.1", 29500, None
    if ends:
        address = ends[0].address  # of rank 0, which holds the store: no port is taken
    else:
        # The parent holds the store, so its port is free for sure.
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port = store.port
    processes = [
        spawn.Process(
            target=serve,
            args=(rank, ranks, (address, port), tuple(ends), queue, target, args),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while (item := queue.get(timeout=900)) is not None:
        yield item
    for rank, process in enumerate(processes):
        process.join()
        if process.exitcode:
            raise SystemExit(f"rank {rank} of {ranks} ended with {process.exitcode}")


def serve(
    rank: int,
    ranks: int,
    address: tuple[str, int],
    ends: tuple[Namespace, ...],
    queue: Any,
    target: Any,
    args: tuple[Any, ...],
) -> None:
    """Run one rank: the main function of its process."""
    if ends:
        _enter(ends[rank])
    torch.set_num_threads(1)
    holds = bool(ends) and rank == 0
    store = dist.TCPStore(*address, is_master=holds, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        target(queue.put if rank == 0 else lambda item: None, *args)
        dist.barrier()
    finally:
        if rank == 0:
            queue.put(None)
    dist.destroy_process_group()


def _enter(end: Namespace) -> None:
    """Put every thread that is started from now on into a namespace; needs root.

    `os.setns` exists since Python 3.12.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = end.interface
    with open(f"/run/netns/{end.name}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _NEW_NETWORK):
            error = ctypes.get_errno()
            raise OSError(error, f"entering {end.name}: {os.strerror(error)}")
