"""Time our templates against aten's flash attention on the GPU, under max-autotune.

The two have different forms of the backward, so the choice is made before a ring is
unrolled, once per shape and direction: forward, and dK/dV and dQ together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import Parts, attention_step_backward
from cpcompile.ops.step.step_arguments import StepChunk

log = logging.getLogger(__name__)

Shape = tuple[int, ...]


@functools.cache
def fastest_kernel(
    q_shape: Shape,
    k_shape: Shape,
    v_shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    backward: bool,
    milliseconds: Callable[[Callable[[], object]], float],
) -> StepKernel:
    """Return TEMPLATE or FLASH, whichever computes a whole chunk faster.

    Args:
        q_shape, k_shape, v_shape: [B, H, R, D], [B, G, K, D], [B, G, K, E], local.
        backward: time the gradients of a step, else the step.
        milliseconds: times a function.
    """
    times = {}
    for kernel in (StepKernel.TEMPLATE, StepKernel.FLASH):
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=device)
            for shape in (q_shape, k_shape, v_shape)
        )
        run = _backward(q, k, v, kernel) if backward else _forward(q, k, v, kernel)
        times[kernel] = milliseconds(run)
    best = min(times, key=times.__getitem__)
    log.info(
        "%s of a step with q %s and k %s: %s",
        "backward" if backward else "forward",
        list(q_shape),
        list(k_shape),
        ", ".join(f"{kernel.value} {ms:.3f} ms" for kernel, ms in times.items()),
    )
    return best


def _forward(
    q: Tensor, k: Tensor, v: Tensor, kernel: StepKernel
) -> Callable[[], object]:
    arguments = StepChunk.plain(q.shape[-1] ** -0.5).arguments()
    how = (False, kernel.value)
    out, lse = attention_step(q, k, v, None, None, *arguments, *how)
    return lambda: attention_step(q, k, v, out, lse, *arguments, *how)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, kernel: StepKernel
) -> Callable[[], object]:
    arguments = StepChunk.plain(q.shape[-1] ** -0.5).arguments()
    out, lse = attention_step(q, k, v, None, None, *arguments, True, kernel.value)
    grad = torch.randn_like(out)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))

    def computed(rows: Tensor, sums: list[Tensor], parts: Parts) -> list[Tensor]:
        told = (parts.value, *arguments, False, kernel.value)
        operands = (grad, q, k, v, lse, rows, sums)
        gradients: list[Tensor] = attention_step_backward(*operands, *told)
        return gradients

    def split() -> None:
        computed(lse, [dk, dv], Parts.DKDV)  # any delta takes the same time
        computed(lse, [dq], Parts.DQ)

    def joint() -> None:
        _, dk_part, dv_part = computed(out, [dq], Parts.ALL)
        torch.add(dk, dk_part), torch.add(dv, dv_part)

    return split if kernel is StepKernel.TEMPLATE else joint
