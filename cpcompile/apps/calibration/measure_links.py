"""Time the exchanges of the operators, through the functions that they use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cpcompile.apps.calibration.measure_compute import TimedStep
from cpcompile.apps.calibration.samples import (
    MessageSample,
    OverlapSample,
    TimedExchange,
)
from cpcompile.apps.calibration.stopwatch import Case, Stopwatch
from cpcompile.ops.comm.communication import all_gather_chunks, reduce_scatter_chunks
from cpcompile.ops.comm.ring_exchange import ring_shift

KIB, MIB = 2**10, 2**20
# Bytes that a rank sends to one other rank, or that enter a collective per rank.
SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LONG_SIZES = (16 * MIB,)
SMALL = 64 * KIB  # up to it, groups of two ranks show what is latency
OVERLAP_SIZES = (256 * KIB, MIB, 4 * MIB)
OVERLAP_TOKENS = ((256, 512, 1024), (1024, 2048, 4096))  # on a CPU, on others
# Share of the time for one kind of exchange that its largest size may take once.
LARGEST_SHARE = 1 / 24
WHERE = "calibration"

_wait = torch.ops.cp.ring_wait.default


def measure_messages(
    watch: Stopwatch,
    group: ProcessGroup,
    seconds: float,
    sizes: Sequence[int],
    kinds: Sequence[TimedExchange] = tuple(TimedExchange),
    senders: int = 0,
    idle: bool = False,
) -> tuple[MessageSample, ...]:
    """Time every kind of exchange in `group`; other groups may do the same meanwhile.

    Sizes that would take too long, as smaller ones show, are left out.

    Args:
        sizes: bytes to each other rank. seconds: about how long to measure.
        senders: of MessageSample. idle: this rank only waits for the others.
    """
    samples: list[MessageSample] = []
    share = seconds / len(kinds)
    for kind in kinds:
        cases: list[Case] = []
        for size in sizes:
            case = _exchange(kind, group, size, watch.device)
            cases.append(_nothing if idle else case)
            if watch.once(cases[-1], warm_up=True) > share * LARGEST_SHARE:
                break
        medians = watch.medians(cases, share)
        for size, time in zip(sizes, medians, strict=False):
            peers = 1 if kind is TimedExchange.HOP else group.size() - 1
            sent = float(peers * size)
            samples.append(MessageSample(kind, group.size(), sent, time, senders))
    return tuple(samples)


def measure_overlap(
    watch: Stopwatch, group: ProcessGroup, seconds: float
) -> tuple[OverlapSample, ...]:
    """Time messages to the next rank beside attention steps, in several proportions."""
    hops = [_exchange(TimedExchange.HOP, group, x, watch.device) for x in OVERLAP_SIZES]
    fits = [watch.once(hop, warm_up=True) < seconds * LARGEST_SHARE for hop in hops]
    hops = hops[: max(1, sum(fits))]
    shapes = OVERLAP_TOKENS[0 if watch.device.type == "cpu" else 1]
    steps = [TimedStep(watch.device, 8, 64, n, n) for n in shapes]
    computations = [partial(step.forward, None, None) for step in steps]
    pairs = [(i, j) for i in range(len(hops)) for j in range(len(steps))]
    chunks = [_chunk(size, watch.device) for size in OVERLAP_SIZES[: len(hops)]]
    both = [partial(_beside, chunks[i], group, computations[j]) for i, j in pairs]
    times = watch.medians([*hops, *computations, *both], seconds)
    alone, rest = times[: len(hops)], times[len(hops) :]
    return tuple(
        OverlapSample(alone[i], rest[j], together)
        for (i, j), together in zip(pairs, rest[len(steps) :], strict=True)
    )


def _nothing() -> None:
    """Do nothing, as a rank that only waits."""


def _beside(chunk: list[Tensor], group: ProcessGroup, computation: Case) -> None:
    arriving = ring_shift(chunk, group.group_name, WHERE)
    computation()
    for x in arriving:
        _wait(x, None, WHERE)


def _chunk(size: int, device: torch.device) -> list[Tensor]:
    """Make k and v of `size` bytes together."""
    return [torch.ones(size // 8, device=device) for _ in range(2)]


def _exchange(
    kind: TimedExchange, group: ProcessGroup, size: int, device: torch.device
) -> Case:
    """Return a case of one exchange; a rank sends `size` bytes to each other one."""
    ranks = group.size()
    if kind is TimedExchange.HOP:
        chunk = _chunk(size, device)

        def hop() -> None:
            for x in ring_shift(chunk, group.group_name, WHERE):
                _wait(x, None, WHERE)

        return hop
    if kind is TimedExchange.ALL_GATHER:
        own = torch.ones(size // 4, device=device)
        return partial(all_gather_chunks, own, group, WHERE)
    rows = torch.ones(ranks, size // 4, device=device)
    if kind is TimedExchange.REDUCE_SCATTER:
        return partial(reduce_scatter_chunks, rows, group, WHERE)

    def all_to_all() -> None:
        dist.all_to_all_single(torch.empty_like(rows), rows, group=group)

    return all_to_all
