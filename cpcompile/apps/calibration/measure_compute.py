"""Time what a rank does alone: attention steps, their sums, copies, small kernels.

All ranks do it at once, so that ranks which share cores are measured sharing them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cpcompile.apps.calibration.samples import KernelSample, SizedSample
from cpcompile.apps.calibration.stopwatch import Case, Stopwatch
from cpcompile.geometry.blocks import Block
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.comm.communication import Packing
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.step.block_attention import row_dots
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.step_arguments import ChunkLimits

HEAD_DIMS = (64, 128)
# (rows, keys, causal) that attention is timed at: on a CPU, and on others.
CPU_HEADS, GPU_HEADS = 2, 16
CPU_SHAPES = (
    *((n, n, causal) for n in (64, 256, 512) for causal in (False, True)),
    (128, 1024, False),
)
CPU_LONG_SHAPES = tuple((n, n, c) for n in (1024, 2048) for c in (False, True))
GPU_SHAPES = (
    *((n, n, causal) for n in (64, 1024, 2048, 4096) for causal in (False, True)),
    (1024, 8192, False),
)
GPU_LONG_SHAPES = ((8192, 8192, False), (8192, 8192, True), (16384, 16384, True))
MERGE_HEADS = 8
MERGE_TOKENS = (16, 128, 512, 2048)
COPY_TOKENS = (16, 128, 512, 2048)
ALONE_SHAPE = (512, 1024)  # rows, keys
CPU_SPEED_SHAPE, GPU_SPEED_SHAPE = ALONE_SHAPE, (2048, 4096)
SPEED_DTYPES = {
    "speed_of_16_bits": torch.bfloat16,
    "speed_of_32_bits": torch.float32,
    "speed_of_64_bits": torch.float64,
}
SCALE = 0.1


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
        self.shape = (heads, head_dim, rows, keys, causal)
        dtype = usual_dtype(device) if dtype is None else dtype
        kernel = step_kernel(device.type, dtype, head_dim, head_dim)
        self.kernel = kernel.value
        self.split = kernel is StepKernel.TEMPLATE
        visible = visible_chunk(0, rows, 0, keys, keys, causal)
        self.arguments = ChunkLimits(SCALE, visible).arguments()

        def make(tokens: int) -> Tensor:
            return torch.randn(1, heads, tokens, head_dim, device=device, dtype=dtype)

        self.q, self.grad = make(rows), make(rows)
        self.k, self.v = make(keys), make(keys)
        self.out, self.lse = self.forward(None, None)
        self.saved = self.out.to(dtype)  # as the operators save it
        self.delta = row_dots(self.grad, self.saved)
        self.dq, self.dk, self.dv = self.backward(None, None, None)

    def forward(self, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run a step that is not the last one, after those that gave (out, lse)."""
        operands = (self.q, self.k, self.v, out, lse)
        out, lse = attention_step(*operands, *self.arguments, False, self.kernel)
        return out, lse

    def backward(
        self, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients, added to those of earlier steps as in ring_backward."""
        operands = (self.grad, self.q, self.k, self.v)
        if self.split:
            rows = (*operands, self.lse, self.delta)
            rest = (*self.arguments, False, self.kernel)
            dk, dv = attention_step_dkdv(*rows, dk, dv, *rest)
            return attention_step_dq(*rows, dq, *rest), dk, dv
        saved = (*operands, self.saved, self.lse, dq)
        dq, dk_new, dv_new, _ = attention_step_backward(
            *saved, *self.arguments, bias_grad=False, final=False, kernel=self.kernel
        )
        if dk is not None and dv is not None:
            dk_new, dv_new = torch.add(dk, dk_new), torch.add(dv, dv_new)
        return dq, dk_new, dv_new

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
    cpu = watch.device.type == "cpu"
    heads = CPU_HEADS if cpu else GPU_HEADS
    shapes: tuple[tuple[int, int, bool], ...] = CPU_SHAPES if cpu else GPU_SHAPES
    if long:
        shapes += CPU_LONG_SHAPES if cpu else GPU_LONG_SHAPES
    what = [(dim, *shape) for dim in HEAD_DIMS for shape in shapes]
    steps = [TimedStep(watch.device, heads, *step_shape) for step_shape in what]
    cases: list[Case] = [partial(step.forward, None, None) for step in steps]
    cases += [partial(step.backward, None, None, None) for step in steps]
    medians = watch.medians(cases, seconds)
    return tuple(
        KernelSample(1, heads, *step_shape, i >= len(what), time)
        for i, (step_shape, time) in enumerate(
            zip([*what, *what], medians, strict=True)
        )
    )


def measure_merges(
    watch: Stopwatch, seconds: float
) -> tuple[tuple[SizedSample, ...], tuple[SizedSample, ...]]:
    """Time what a later step takes longer than the first, forward and backward.

    Sizes are elements of the output, and of the queries, with as many keys. Our kernels
    merge inside, so for them it is the difference between a later and a first step.
    """
    steps = [
        TimedStep(watch.device, MERGE_HEADS, HEAD_DIMS[0], n, n) for n in MERGE_TOKENS
    ]
    if steps[0].split:
        cases: list[Case] = [partial(s.forward, None, None) for s in steps]
        cases += [partial(s.backward, None, None, None) for s in steps]
        cases += [partial(s.forward, s.out, s.lse) for s in steps]
        cases += [partial(s.backward, s.dq, s.dk, s.dv) for s in steps]
        times = watch.medians(cases, seconds)
        half = len(times) // 2
        extra = [b - a for a, b in zip(times[:half], times[half:], strict=True)]
    else:
        cases = [s.merge for s in steps]
        extra = watch.medians([*cases, *(s.add_gradients for s in steps)], seconds)
    sizes = [step.q.numel() for step in steps]
    count = len(steps)
    forward, backward = extra[:count], extra[count:]
    return tuple(map(SizedSample, sizes, forward)), tuple(
        map(SizedSample, sizes, backward)
    )


def measure_copies(watch: Stopwatch, seconds: float) -> tuple[SizedSample, ...]:
    """Time the packing of k and v into one buffer, by bytes read and written."""
    cases: list[Case] = []
    sizes = []
    for tokens in COPY_TOKENS:
        k = torch.randn(1, tokens, 8, 128, device=watch.device).transpose(1, 2)
        packing = Packing.of(k, k, tokens)
        cases.append(partial(packing.pack, k, k))
        sizes.append(2 * 2 * k.nbytes)
    medians = watch.medians(cases, seconds)
    return tuple(map(SizedSample, sizes, medians))


def measure_alone_speedup(watch: Stopwatch, seconds: float) -> float:
    """Return the speedup of the first rank while the others wait; at least 1."""
    step = TimedStep(watch.device, CPU_HEADS, HEAD_DIMS[0], *ALONE_SHAPE)
    first = watch.group.rank() == 0

    def one() -> None:
        if first:
            step.forward(None, None)

    together, alone = watch.medians([partial(step.forward, None, None), one], seconds)
    return max(1.0, together / alone)


def measure_speeds(watch: Stopwatch, seconds: float) -> dict[str, float]:
    """Time each dtype against the usual one; return speeds by profile field."""
    cpu = watch.device.type == "cpu"
    heads = CPU_HEADS if cpu else GPU_HEADS
    shape = CPU_SPEED_SHAPE if cpu else GPU_SPEED_SHAPE
    steps = [
        TimedStep(watch.device, heads, HEAD_DIMS[1], *shape, dtype=dtype)
        for dtype in SPEED_DTYPES.values()
    ]
    times = watch.medians([partial(s.forward, None, None) for s in steps], seconds)
    times_by_dtype = dict(zip(SPEED_DTYPES.values(), times, strict=True))
    usual = times_by_dtype[usual_dtype(watch.device)]
    return {name: usual / times_by_dtype[dtype] for name, dtype in SPEED_DTYPES.items()}


def measure_launches(watch: Stopwatch, seconds: float) -> tuple[SizedSample, ...]:
    """Time kernels with next to nothing to do: copies of a few elements."""
    target = torch.zeros(1, 8, 2, 4, device=watch.device)
    source = torch.ones_like(target)
    medians = watch.medians([partial(target.copy_, source)] * 3, seconds)
    return tuple(SizedSample(1.0, time) for time in medians)
