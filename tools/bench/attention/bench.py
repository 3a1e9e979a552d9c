"""Times attention alone on 2 ranks of one thread each, and its peak memory.

Causal, float32, B=1, H=8, D=64, whole forward and backward. All peers take turns within
one run, so that a slow minute of the machine meets all of them; a figure is the median
of its repetitions, a time is that of the slowest rank. Every peer is first compared
with one process on a short sequence. Results go to docs/results/bench_attention.*.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tools.bench.attention.peers import Peer, all_peers, ours
from tools.bench.attention.report import markdown
from tools.bench.operands import (
    BATCH,
    CHECK_TOKENS,
    HEAD_DIM,
    HEADS,
    SHAPE,
    assert_close,
    exact,
    make_whole,
)
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.results import RESULTS, setup, write_report

RANKS = 2
MEMORY_TOKENS = 8192
MEMORY_RANKS = (1, 2, 4)
STRATEGIES = ("ring", "all_gather")

# The naive loop takes a multiple of all others; a third of the repetitions is enough
# to see a factor of five.
NAIVE_SHARE = 3


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args(arguments)
    about = setup(shape=SHAPE, ranks=RANKS, reps=options.reps)
    record: dict[str, Any] = {"setup": about, "times": [], "memory": []}
    steps = len(options.seq) * (options.reps + 1) + len(MEMORY_RANKS) * len(STRATEGIES)
    collect(record, measure(options.seq, options.reps), steps)
    print(write_report(options.out, "bench_attention", record, markdown))


def measure(lengths: list[int], reps: int) -> Iterator[Event]:
    """("step", description), ("times", ...) and ("memory", ...), as they come."""
    yield from in_processes(RANKS, time_peers, lengths, reps)
    for strategy in STRATEGIES:
        for ranks in MEMORY_RANKS:
            yield from in_processes(ranks, peak_memory, strategy)


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
    expected = shards(peer, exact(whole))
    if peer.layout == "whole" and dist.get_rank() > 0:
        return
    saved = peer.forward(*qkv)
    got = (saved[0], *peer.backward(grad, *qkv, *saved)[:3])
    assert_close(peer.name, got, expected)


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
