"""Times attention alone on 2 ranks of one thread each, and its peak memory.

Causal, float32, B=1, H=8, D=64, whole forward and backward. All peers take turns within
one run, so that a slow minute of the machine meets all of them; a figure is the median
of its repetitions, a time is that of the slowest rank. Every peer is first compared
with one process on a short sequence. Results go to docs/results/bench_attention.*.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attention_peers import Peer, all_peers, ours
from bench_attention_report import markdown
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor

BATCH, HEADS, HEAD_DIM = 1, 8, 64
RANKS = 2
CHECK_TOKENS = 256
MEMORY_TOKENS = 8192
MEMORY_RANKS = (1, 2, 4)
STRATEGIES = ("ring", "all_gather")

# The naive loop takes a multiple of all others; a third of the repetitions is enough
# to see a factor of five.
NAIVE_SHARE = 3


def main() -> None:
    results = Path(__file__).parent.parent / "docs" / "results"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=results, help="folder")
    options = parser.parse_args()
    record: dict[str, Any] = {"setup": setup(options.reps), "times": [], "memory": []}
    steps = len(options.seq) * (options.reps + 1) + len(MEMORY_RANKS) * len(STRATEGIES)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        task = progress.add_task("start", total=steps)
        for kind, value in measure(options.seq, options.reps):
            if kind == "step":
                progress.update(task, description=value, advance=1)
            else:
                record[kind].append(value)
    text = markdown(record)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench_attention.json").write_text(json.dumps(record, indent=1))
    (options.out / "bench_attention.md").write_text(text)
    print(text)


def setup(reps: int) -> dict[str, Any]:
    """What a reader needs to compare: versions, processors, shapes, the date."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "shape": f"B={BATCH}, H={HEADS}, D={HEAD_DIM}, float32, causal",
        "ranks": RANKS,
        "reps": reps,
    }


def measure(lengths: list[int], reps: int) -> Iterator[tuple[str, Any]]:
    """("step", description), ("times", ...) and ("memory", ...), as they come."""
    yield from in_processes(RANKS, time_peers, lengths, reps)
    for strategy in STRATEGIES:
        for ranks in MEMORY_RANKS:
            yield from in_processes(ranks, peak_memory, strategy)


def in_processes(ranks: int, target: Any, *args: Any) -> Iterator[tuple[str, Any]]:
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


def time_peers(put: Any, lengths: list[int], reps: int) -> None:
    """Medians of all peers at all lengths, in seconds of the slowest rank."""
    peers = all_peers()
    whole = make_whole(CHECK_TOKENS)
    for peer in peers:
        check(peer, whole)
    for length in lengths:
        whole = make_whole(length)
        seconds: dict[str, list[tuple[float, float]]] = {p.name: [] for p in peers}
        for rep in range(reps + 1):  # the first one warms up
            put(("step", f"{length} tokens, repetition {rep} of {reps}"))
            for peer in peers:
                if peer.name == "naive_loop" and rep % NAIVE_SHARE != 1:
                    continue
                pair = time_once(peer, shards(peer, whole))
                if rep:
                    seconds[peer.name].append(pair)
        for name, pairs in seconds.items():
            times = {
                "peer": name,
                "tokens": length,
                "forward": statistics.median(pair[0] for pair in pairs),
                "both": statistics.median(sum(pair) for pair in pairs),
                "repetitions": len(pairs),
            }
            put(("times", times))


def time_once(peer: Peer, operands: list[Tensor]) -> tuple[float, float]:
    """Seconds of the forward and of the backward, barrier to barrier."""
    *qkv, grad = operands
    idle = peer.layout == "whole" and dist.get_rank() > 0
    torch.set_num_threads(peer.threads)
    dist.barrier()
    start = time.perf_counter()
    saved = () if idle else peer.forward(*qkv)
    dist.barrier()
    middle = time.perf_counter()
    if not idle:
        peer.backward(grad, *qkv, *saved)
    dist.barrier()
    end = time.perf_counter()
    torch.set_num_threads(1)
    return middle - start, end - middle


def make_whole(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of out, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, tokens, HEAD_DIM)
    return [torch.randn(shape, generator=generator) for _ in range(4)]


def shards(peer: Peer, whole: list[Tensor]) -> list[Tensor]:
    """This rank's tokens of `whole` in the layout of `peer`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if peer.layout == "whole":
        return whole
    if peer.layout == "contiguous":
        return [x.chunk(ranks, 2)[rank].contiguous() for x in whole]
    parts = [x.chunk(2 * ranks, 2) for x in whole]
    return [torch.cat((x[rank], x[2 * ranks - 1 - rank]), 2) for x in parts]


def check(peer: Peer, whole: list[Tensor]) -> None:
    """Assert that `peer` computes attention and its gradients."""
    *qkv, grad = shards(peer, whole)
    *leaves, whole_grad = (x.double().requires_grad_() for x in whole)
    exact = F.scaled_dot_product_attention(*leaves, is_causal=True)
    grads = torch.autograd.grad(exact, leaves, whole_grad)
    expected = shards(peer, [exact.detach(), *grads])
    if peer.layout == "whole" and dist.get_rank() > 0:
        return
    saved = peer.forward(*qkv)
    got = (saved[0], *peer.backward(grad, *qkv, *saved)[:3])
    for x, reference in zip(got, expected, strict=True):
        error = (x.detach() - reference).abs().max() / reference.abs().max()
        assert error < 1e-5, f"{peer.name}: relative error {error:.2g}"


def peak_memory(put: Any, strategy: str) -> None:
    """Peak resident memory of the largest rank, before and after both passes."""
    ranks = dist.get_world_size()
    put(("step", f"memory of {strategy} on {ranks} ranks"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (BATCH, HEADS, MEMORY_TOKENS // ranks, HEAD_DIM)
    *qkv, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    peer = ours(strategy)
    for tokens in (64, shape[2]):  # the short call loads what is loaded lazily
        before = resident_mib()
        q, k, v, dout = (x[:, :, :tokens] for x in (*qkv, grad))
        peer.backward(dout, q, k, v, *peer.forward(q, k, v))
    mine = torch.tensor([before, resident_mib(), resident_mib() - before])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    memory = {
        "strategy": strategy,
        "ranks": ranks,
        "tokens": MEMORY_TOKENS,
        "shard_mib": 4 * qkv[0].nbytes / 2**20,
        "start_mib": mine[0].item(),
        "peak_mib": mine[1].item(),
        "growth_mib": mine[2].item(),
    }
    put(("memory", memory))


def resident_mib() -> float:
    """The peak resident memory of this process; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
