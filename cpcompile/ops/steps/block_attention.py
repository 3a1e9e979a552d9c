"""Attention of some query rows on one block of keys: aten's kernels, or plain math.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Key and value heads are never repeated.
"""

from __future__ import annotations

from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.steps.aten_flash import flash_backward, flash_forward, is_too_small
from cpcompile.ops.steps.math_attention import (
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
    """Softmax attention of one block.

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
    """Gradients of one block, given the *final* out and lse of its rows.

    With the lse over all keys, exp(score - lse) is the true probability, so the
    gradients of blocks simply add up. Returns dq [B, H, R, D], dk [B, G, K, D] and
    dv [B, G, K, E], in q's dtype by aten's kernel on a GPU, else in the accumulation
    dtype.
    """
    if kernel is StepKernel.MATH:
        delta = row_dots(grad_BHRE, out_BHRE)
        hidden = _hidden(q_BHRD, k_BGKD, triangular)
        return math_backward(
            grad_BHRE, q_BHRD, k_BGKD, v_BGKE, lse_BHR, delta, hidden, scale
        )
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR)
    return flash_backward(*operands, triangular, scale)


def row_dots(grad_BHRE: Tensor, out_BHRE: Tensor) -> Tensor:
    """grad . out per row, [B, H, R] in the accumulation dtype: what backwards need."""
    dtype = accumulation_dtype(grad_BHRE.dtype)
    return (grad_BHRE.to(dtype) * out_BHRE.to(dtype)).sum(-1)


def take_rows(x: Tensor, block: Block) -> Tensor:
    """The query rows of `block`, a view: x is [B, H, rows, ...]."""
    return _take(x, block.row, block.rows, block.step)


def take_keys(x: Tensor, block: Block) -> Tensor:
    """The keys of `block`, a view: x is [B, G, keys, ...]."""
    return _take(x, block.key, block.keys, block.step)


def _take(x: Tensor, start: int, count: int, step: int) -> Tensor:
    return x.narrow(2, start, (count - 1) * step + 1)[:, :, ::step]


def _hidden(q_BHRD: Tensor, k_BGKD: Tensor, triangular: bool) -> Tensor | None:
    if not triangular:
        return None
    return hidden_above_diagonal(q_BHRD.shape[2], k_BGKD.shape[2], q_BHRD.device)
