"""Time attention steps, copies and exchanges, on all ranks together.

All ranks do it at once, so that ranks which share cores are measured sharing them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cpcompile.apps.calibration.fit_profile import (
    KernelSample,
    MessageSample,
    Overlap,
    Samples,
    Sized,
    TimedExchange,
)
from cpcompile.apps.calibration.stopwatch import Case, Stopwatch
from cpcompile.geometry.blocks import Block
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.comm.communication import (
    Packing,
    all_gather_chunks,
    reduce_scatter_chunks,
)
from cpcompile.ops.comm.ring_exchange import ring_shift
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import Parts, attention_step_backward
from cpcompile.ops.step.block_attention import row_dots
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.step_arguments import StepChunk

HEAD_DIMS = (64, 128)
# On a CPU, and on others. (rows, keys, causal) that attention is timed at, and those of
# long sequences; (rows, keys) of the step that tells dtypes apart.
HEADS = {True: 2, False: 16}
SHAPES = {
    True: (
        *((n, n, causal) for n in (64, 256, 512) for causal in (False, True)),
        (128, 1024, False),
    ),
    False: (
        *((n, n, causal) for n in (64, 1024, 2048, 4096) for causal in (False, True)),
        (1024, 8192, False),
    ),
}
LONG_SHAPES = {
    True: tuple((n, n, c) for n in (1024, 2048) for c in (False, True)),
    False: ((8192, 8192, False), (8192, 8192, True), (16384, 16384, True)),
}
SPEED_SHAPE = {True: (512, 1024), False: (2048, 4096)}
OVERLAP_TOKENS = {True: (256, 512, 1024), False: (1024, 2048, 4096)}
SPEED_DTYPES = {
    "speed_of_16_bits": torch.bfloat16,
    "speed_of_32_bits": torch.float32,
    "speed_of_64_bits": torch.float64,
}
TOKENS = (16, 128, 512, 2048)  # of merges and copies
SCALE = 0.1
KIB, MIB = 2**10, 2**20
# Bytes that a rank sends to one other rank, or that enter a collective per rank.
SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
LONG_SIZES = (16 * MIB,)
SMALL = 64 * KIB  # up to it, groups of two ranks show what is latency
OVERLAP_SIZES = (256 * KIB, MIB, 4 * MIB)
# Share of the time for one kind of exchange that its largest size may take once.
LARGEST_SHARE = 1 / 24
WHERE = "calibration"

_wait = torch.ops.cp.ring_wait.default


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


def usual_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which rates are measured on such a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class TimedStep:
    """One attention step on random tensors, by the kernel that this device uses.

    dtype: None is the usual one of the device.
    """

    def __init__(
        self,
        device: torch.device,
        heads: int,
        head_dim: int,
        rows: int,
        keys: int,
        causal: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        dtype = usual_dtype(device) if dtype is None else dtype
        kernel = step_kernel(device.type, dtype, head_dim, head_dim)
        self.kernel, self.split = kernel.value, kernel is StepKernel.TEMPLATE
        visible = visible_chunk(0, rows, 0, keys, keys, causal)
        self.arguments = StepChunk.plain(SCALE, visible).arguments()
        self.q, self.grad, self.k, self.v = (
            torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)
            for tokens in (rows, rows, keys, keys)
        )
        self.out, self.lse = self.forward()
        self.saved = self.out.to(dtype)  # as the operators save it
        self.delta = row_dots(self.grad, self.saved)
        self.dq, self.dk, self.dv = self.backward()

    def forward(self, *earlier: Tensor) -> tuple[Tensor, Tensor]:
        """Run a step that is not the last one, after those that gave (out, lse)."""
        operands = (self.q, self.k, self.v, *(earlier or (None, None)))
        out, lse = attention_step(*operands, *self.arguments, False, self.kernel)
        return out, lse

    def backward(self, *earlier: Tensor) -> tuple[Tensor, ...]:
        """Compute (dq, dk, dv), added to those of earlier steps as in ring_backward."""
        of_rows, of_keys = list(earlier[:1]), list(earlier[1:])
        operands = (self.grad, self.q, self.k, self.v, self.lse)
        rest = (*self.arguments, False, self.kernel)
        if self.split:
            rows = (*operands, self.delta)
            keys = attention_step_backward(*rows, of_keys, Parts.DKDV.value, *rest)
            dq = attention_step_backward(*rows, of_rows, Parts.DQ.value, *rest)
            return (*dq, *keys)
        saved = (*operands, self.saved, of_rows)
        dq, *new = attention_step_backward(*saved, Parts.ALL.value, *rest)
        return dq, *(map(torch.add, of_keys, new) if of_keys else new)

    def merge(self) -> None:
        """Do the merge that aten's kernels need after a later forward step."""
        running = RunningAttention(self.q, self.v.shape[-1], self.out, self.lse)
        every = Block(0, self.q.shape[2], 0, self.k.shape[2])
        running.merge(every, self.out, self.lse)
        running.result(False)

    def add_gradients(self) -> None:
        """Do the additions that aten's kernels need after a later backward step."""
        for x in (self.dq, self.dk, self.dv):
            torch.add(x, x)


def measure_kernels(
    watch: Stopwatch, seconds: float, long: bool
) -> tuple[KernelSample, ...]:
    """Time forward and backward of first steps; `long` adds long sequences."""
    heads = HEADS[watch.on_cpu]
    shapes = SHAPES[watch.on_cpu] + (LONG_SHAPES[watch.on_cpu] if long else ())
    what = [(heads, dim, *shape) for dim in HEAD_DIMS for shape in shapes]
    steps = [TimedStep(watch.device, *step_shape) for step_shape in what]
    cases: list[Case] = [*(s.forward for s in steps), *(s.backward for s in steps)]
    medians = iter(watch.medians(cases, seconds))
    return tuple(
        KernelSample(*step_shape, backward, next(medians))
        for backward in (False, True)
        for step_shape in what
    )


def measure_merges(watch: Stopwatch, seconds: float) -> tuple[Sized, Sized]:
    """Time what a later step takes longer than the first, forward and backward.

    Sizes are elements of the output, and of the queries, with as many keys. Our kernels
    merge inside, so for them it is the difference between a later and a first step.
    """
    steps = [TimedStep(watch.device, 8, HEAD_DIMS[0], n, n) for n in TOKENS]
    if steps[0].split:
        cases: list[Case] = [*(s.forward for s in steps), *(s.backward for s in steps)]
        cases += [partial(s.forward, s.out, s.lse) for s in steps]
        cases += [partial(s.backward, s.dq, s.dk, s.dv) for s in steps]
        times = watch.medians(cases, seconds)
        extra = [b - a for a, b in zip(times, times[2 * len(steps) :], strict=False)]
    else:
        cases = [*(s.merge for s in steps), *(s.add_gradients for s in steps)]
        extra = watch.medians(cases, seconds)
    sizes = [step.q.numel() for step in steps]
    sized = list(zip(2 * sizes, extra, strict=True))
    return sized[: len(steps)], sized[len(steps) :]


def measure_copies(watch: Stopwatch, seconds: float) -> Sized:
    """Time the packing of k and v into one buffer, by bytes read and written."""
    chunks = [
        torch.randn(1, n, 8, 128, device=watch.device).transpose(1, 2) for n in TOKENS
    ]
    cases = [partial(Packing.of(k, k, k.shape[2]).pack, k, k) for k in chunks]
    sizes = [2 * 2 * k.nbytes for k in chunks]
    return tuple(zip(sizes, watch.medians(cases, seconds), strict=True))


def measure_launch(watch: Stopwatch, seconds: float) -> float:
    """Time a kernel with next to nothing to do: a copy of a few elements."""
    target = torch.zeros(1, 8, 2, 4, device=watch.device)
    return watch.medians([partial(target.copy_, torch.ones_like(target))], seconds)[0]


def measure_alone_speedup(watch: Stopwatch, seconds: float) -> float:
    """Return the speedup of the first rank while the others wait; at least 1."""
    step = TimedStep(watch.device, HEADS[True], HEAD_DIMS[0], *SPEED_SHAPE[True])
    alone_case = step.forward if watch.group.rank() == 0 else _nothing
    together, alone = watch.medians([step.forward, alone_case], seconds)
    return max(1.0, together / alone)


def measure_speeds(watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Time each dtype against the usual one; return speeds by profile field."""
    shape = (HEADS[watch.on_cpu], HEAD_DIMS[1], *SPEED_SHAPE[watch.on_cpu])
    steps = [TimedStep(watch.device, *shape, dtype=x) for x in SPEED_DTYPES.values()]
    times = watch.medians([step.forward for step in steps], seconds)
    by_dtype = dict(zip(SPEED_DTYPES.values(), times, strict=True))
    usual = by_dtype[usual_dtype(watch.device)]
    return {name: usual / by_dtype[dtype] for name, dtype in SPEED_DTYPES.items()}


def measure_messages(
    watch: Stopwatch,
    group: ProcessGroup,
    seconds: float,
    sizes: Sequence[int],
    kinds: Sequence[TimedExchange] = tuple(TimedExchange),
    senders: int = 0,
    idle: bool = False,
) -> list[MessageSample]:
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
            cases.append(_nothing if idle else _exchange(kind, group, size, watch))
            if watch.once(cases[-1], warm_up=True) > share * LARGEST_SHARE:
                break
        peers = 1 if kind is TimedExchange.HOP else group.size() - 1
        samples += [
            MessageSample(kind, group.size(), float(peers * size), time, senders)
            for size, time in zip(sizes, watch.medians(cases, share), strict=False)
        ]
    return samples


def measure_overlap(watch: Stopwatch, seconds: float) -> tuple[Overlap, ...]:
    """Time messages to the next rank beside attention steps, in several proportions."""
    group = watch.group
    hops = [_exchange(TimedExchange.HOP, group, x, watch) for x in OVERLAP_SIZES]
    fits = [watch.once(hop, warm_up=True) < seconds * LARGEST_SHARE for hop in hops]
    hops = hops[: max(1, sum(fits))]
    tokens = OVERLAP_TOKENS[watch.on_cpu]
    steps = [TimedStep(watch.device, 8, 64, n, n).forward for n in tokens]
    pairs = [(i, j) for i in range(len(hops)) for j in range(len(steps))]
    both = [_hop(group, OVERLAP_SIZES[i], watch.device, steps[j]) for i, j in pairs]
    times = watch.medians([*hops, *steps, *both], seconds)
    alone, rest = times[: len(hops)], times[len(hops) :]
    return tuple(
        (alone[i], rest[j], together)
        for (i, j), together in zip(pairs, rest[len(steps) :], strict=True)
    )


def measure(watch: Stopwatch, effort: Effort) -> Samples:
    """Take all samples, on all ranks together."""
    merges, backward_merges = measure_merges(watch, effort.merges)
    several = watch.group.size() > 1
    return Samples(
        kernels=measure_kernels(watch, effort.kernels, effort.long),
        copies=measure_copies(watch, effort.copies),
        merges=merges,
        backward_merges=backward_merges,
        launch=measure_launch(watch, effort.copies / 4),
        messages=_messages(watch, effort) if several else (),
        overlaps=measure_overlap(watch, effort.overlap) if several else (),
        alone_speedup=measure_alone_speedup(watch, effort.copies),
        speeds=measure_speeds(watch, effort.copies),
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


def _messages(watch: Stopwatch, effort: Effort) -> list[MessageSample]:
    """Time exchanges of the ranks of a node, in pairs of them, and between nodes.

    Large all-to-alls in groups of 2, 4, ... ranks of a node, all at once, show which
    ranks share a host bridge.
    """
    sizes = SIZES + (LONG_SIZES if effort.long else ())
    small = [x for x in sizes if x <= SMALL]
    large = [x for x in sizes if x > SMALL]
    size, near = watch.group.size(), ranks_per_node(watch.group)
    ranks = dist.get_process_group_ranks(watch.group)
    hop, *collectives = TimedExchange

    def own_group(count: int) -> ProcessGroup:
        return _my_group(
            watch.group, [ranks[i : i + count] for i in range(0, size, count)]
        )

    node = watch.group if near == size else own_group(near)
    samples = measure_messages(watch, node, effort.messages, sizes)
    if near < size:
        across = _my_group(watch.group, [ranks[i::near] for i in range(near)])
        for senders in (1, near):
            idle = senders == 1 and watch.group.rank() % near > 0
            half = effort.small_groups / 2
            samples += measure_messages(
                watch, across, half, sizes, [hop], senders=senders, idle=idle
            )
    elif size > 2 and size % 2 == 0:
        seconds = effort.small_groups
        samples += measure_messages(watch, own_group(2), seconds, small, collectives)
    counts = [2**i for i in range(1, near.bit_length()) if 2**i < near]
    for count in counts:
        if near % count == 0:
            seconds = effort.small_groups / len(counts)
            kinds = [TimedExchange.ALL_TO_ALL]
            samples += measure_messages(watch, own_group(count), seconds, large, kinds)
    return samples


def _my_group(group: ProcessGroup, all_ranks: Sequence[Sequence[int]]) -> ProcessGroup:
    """Create and return the group of this rank, one of the groups in `all_ranks`."""
    mine = dist.get_process_group_ranks(group)[group.rank()]
    (own,) = [list(ranks) for ranks in all_ranks if mine in ranks]
    # Only the members call it: `group` need not be all ranks there are.
    own_group = dist.new_group(own, use_local_synchronization=True)
    assert isinstance(own_group, ProcessGroup), "this rank is a member"
    return own_group


def _nothing() -> None:
    """Do nothing, as a rank that only waits."""


def _hop(
    group: ProcessGroup, size: int, device: torch.device, meanwhile: Case = _nothing
) -> Case:
    """Return a case of a message of k and v, of `size` bytes together."""
    chunk = [torch.ones(size // 8, device=device) for _ in range(2)]

    def hop() -> None:
        arriving = ring_shift(chunk, group.group_name, WHERE)
        meanwhile()
        for x in arriving:
            _wait(x, None, WHERE)

    return hop


def _exchange(
    kind: TimedExchange, group: ProcessGroup, size: int, watch: Stopwatch
) -> Case:
    """Return a case of one exchange; a rank sends `size` bytes to each other one."""
    if kind is TimedExchange.HOP:
        return _hop(group, size, watch.device)
    rows = torch.ones(group.size(), size // 4, device=watch.device)
    if kind is TimedExchange.ALL_GATHER:
        return partial(all_gather_chunks, rows[0], group, WHERE)
    if kind is TimedExchange.REDUCE_SCATTER:
        return partial(reduce_scatter_chunks, rows, group, WHERE)
    return lambda: dist.all_to_all_single(torch.empty_like(rows), rows, group=group)
