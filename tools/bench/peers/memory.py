"""Measure the peak memory of attention alone, each case in fresh processes."""

from __future__ import annotations

import resource
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.operands import BATCH, HEAD_DIM, HEADS
from tools.bench.peers.attentions import OURS, ours
from tools.bench.peers.documents import Mask

TOKENS = 8192
RANKS = (1, 2, 4)
STRATEGIES = tuple(OURS)
SHORT = 64  # tokens of a rank, of a call that loads what is loaded lazily


def peak_memory(put: Any, name: str) -> None:
    """Put the largest rank's peak resident memory, before and after both passes."""
    ranks = dist.get_world_size()
    put(("step", f"memory of {name} on {ranks} ranks"))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (BATCH, HEADS, TOKENS // ranks, HEAD_DIM)
    *qkv, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    peer = ours(name, Mask.CAUSAL)
    for tokens in (SHORT, shape[2]):
        before = resident_mib()
        q, k, v, dout = (x[:, :, :tokens] for x in (*qkv, grad))
        peer.backward(dout, q, k, v, *peer.forward(q, k, v))
    mine = torch.tensor([before, resident_mib(), resident_mib() - before])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    memory = {
        "strategy": name,
        "ranks": ranks,
        "tokens": TOKENS,
        "shard_mib": 4 * qkv[0].nbytes / 2**20,
        "start_mib": mine[0].item(),
        "peak_mib": mine[1].item(),
        "growth_mib": mine[2].item(),
    }
    put(("memory", memory))


def resident_mib() -> float:
    """Return the peak resident memory of this process; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
