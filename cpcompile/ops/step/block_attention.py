"""Attention of some query rows on one block of keys: aten's kernels, or plain math.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Key and value heads are never repeated.

Note [Gradient of the log-sum-exp]
Where the lse of a row has a gradient g, delta, which is grad . out of the row, becomes
delta - g in the gradient of its scores, p * (grad . v - delta). Kernels that compute
delta themselves are given it by one more column: -g in grad, 1 in out, and 0 in v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.step.aten_flash import flash_backward, flash_forward, is_too_small
from cpcompile.ops.step.math_attention import (
    accumulation_dtype,
    hidden_above_diagonal,
    math_backward,
    math_forward,
)


def block_attention(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    triangular: bool,
    scale: float,
    kernel: StepKernel,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention of one block.

    Returns out [B, H, R, E] in q's dtype, normalised over the keys of this block, and
    the log-sum-exp of the scaled scores, [B, H, R] in the accumulation dtype. There
    must be at least one row and one key; then every row sees a key.
    """
    if kernel is StepKernel.MATH or is_too_small(q_BHRD, k_BGKD):
        hidden = _hidden(q_BHRD, k_BGKD, triangular)
        out, lse = math_forward(q_BHRD, k_BGKD, v_BGKE, hidden, scale)
        return out.to(q_BHRD.dtype), lse
    return flash_forward(q_BHRD, k_BGKD, v_BGKE, triangular, scale)


def block_attention_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    triangular: bool,
    scale: float,
    kernel: StepKernel,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of one block, given the *final* out and lse of its rows.

    With the lse over all keys, exp(score - lse) is the true probability, so the
    gradients of blocks simply add up. grad and out may have the column of
    Note [Gradient of the log-sum-exp]. Returns dq [B, H, R, D], dk [B, G, K, D] and
    dv [B, G, K, E], in q's dtype by aten's kernels, see flash_backward, else in the
    accumulation dtype.
    """
    if kernel is StepKernel.MATH:
        delta = row_dots(grad_BHRE, out_BHRE)
        hidden = _hidden(q_BHRD, k_BGKD, triangular)
        grad = without_column(grad_BHRE, v_BGKE)
        return math_backward(
            grad, q_BHRD, k_BGKD, v_BGKE, lse_BHR, delta, hidden, scale
        )
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR)
    return flash_backward(*operands, triangular, scale)


def row_dots(
    grad_BHRE: Tensor, out_BHRE: Tensor, grad_lse_BHR: Tensor | None = None
) -> Tensor:
    """Compute delta, [B, H, R] in the accumulation dtype: grad . out per row.

    The gradient of the lse is subtracted, see Note [Gradient of the log-sum-exp].
    """
    dtype = accumulation_dtype(grad_BHRE.dtype)
    dots = (grad_BHRE.to(dtype) * out_BHRE.to(dtype)).sum(-1)
    return dots if grad_lse_BHR is None else dots - grad_lse_BHR


def with_column(
    grad_BHRE: Tensor, out_BHRE: Tensor, grad_lse_BHR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return grad and out with the column of Note [Gradient of the log-sum-exp]."""
    if grad_lse_BHR is None:
        return grad_BHRE, out_BHRE
    column = -grad_lse_BHR.to(grad_BHRE.dtype).unsqueeze(-1)
    ones = torch.ones_like(column, dtype=out_BHRE.dtype)
    return torch.cat([grad_BHRE, column], -1), torch.cat([out_BHRE, ones], -1)


def without_column(grad_BHRE: Tensor, v_BGKE: Tensor) -> Tensor:
    """Return the gradient of out alone; undo `with_column`."""
    if grad_BHRE.shape[-1] == v_BGKE.shape[-1]:
        return grad_BHRE
    return grad_BHRE[..., : v_BGKE.shape[-1]].contiguous()


def backward_kernel(
    q_BHRD: Tensor, v_BGKE: Tensor, grad_lse_BHR: Tensor | None
) -> StepKernel:
    """Choose the kernel for the backward of steps; flash needs room for the column."""
    operand = (q_BHRD.device.type, q_BHRD.dtype, q_BHRD.shape[-1])
    kernel = step_kernel(*operand, v_BGKE.shape[-1])
    if kernel is StepKernel.FLASH and grad_lse_BHR is not None:
        kernel = step_kernel(*operand, v_BGKE.shape[-1] + 1)
    return kernel


def take_rows(x: Tensor, block: Block) -> Tensor:
    """View the query rows of `block`; x is [B, H, rows, ...]."""
    return _take(x, block.row, block.rows, block.step)


def take_keys(x: Tensor, block: Block) -> Tensor:
    """View the keys of `block`; x is [B, G, keys, ...]."""
    return _take(x, block.key, block.keys, block.step)


def _take(x: Tensor, start: int, count: int, step: int) -> Tensor:
    return x.narrow(2, start, (count - 1) * step + 1)[:, :, ::step]


def _hidden(q_BHRD: Tensor, k_BGKD: Tensor, triangular: bool) -> Tensor | None:
    if not triangular:
        return None
    return hidden_above_diagonal(q_BHRD.shape[2], k_BGKD.shape[2], q_BHRD.device)
