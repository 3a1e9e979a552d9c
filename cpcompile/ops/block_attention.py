"""Attention of some query rows on one block of keys: aten's kernels, or plain math.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Key and value heads are never repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.math_attention import (
    accumulation_dtype,
    hidden_above_diagonal,
    math_backward,
    math_forward,
)

aten = torch.ops.aten


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
    if kernel is StepKernel.MATH:
        hidden = _hidden(q_BHRD, k_BGKD, triangular)
        out, lse = math_forward(q_BHRD, k_BGKD, v_BGKE, hidden, scale)
        return out.to(q_BHRD.dtype), lse
    value_dim = v_BGKE.shape[-1]
    q_BHRD, k_BGKD, v_BGKE = pad_head_dims(q_BHRD, k_BGKD, v_BGKE)
    if q_BHRD.device.type == "cpu":
        out_BHRD, lse_BHR = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHRD, k_BGKD, v_BGKE, 0.0, triangular, scale=scale
        )
    else:
        out_BHRD, lse_BHR, *_ = aten._scaled_dot_product_flash_attention(
            q_BHRD, k_BGKD, v_BGKE, 0.0, triangular, False, scale=scale
        )
    return out_BHRD[..., :value_dim], lse_BHR


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
    dv [B, G, K, E] in q's dtype (math: accumulation dtype).
    """
    if kernel is StepKernel.MATH:
        delta = row_dots(grad_BHRE, out_BHRE)
        hidden = _hidden(q_BHRD, k_BGKD, triangular)
        return math_backward(
            grad_BHRE, q_BHRD, k_BGKD, v_BGKE, lse_BHR, delta, hidden, scale
        )
    head_dim, value_dim = q_BHRD.shape[-1], v_BGKE.shape[-1]
    q_BHRD, k_BGKD, v_BGKE = pad_head_dims(q_BHRD, k_BGKD, v_BGKE)
    pad = v_BGKE.shape[-1] - value_dim
    if pad:
        grad_BHRE, out_BHRE = F.pad(grad_BHRE, (0, pad)), F.pad(out_BHRE, (0, pad))
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR)
    if q_BHRD.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, triangular, scale=scale
        )
    else:
        rows, keys = q_BHRD.shape[2], k_BGKD.shape[2]
        unused = torch.empty((), dtype=torch.int64, device=q_BHRD.device)  # dropout's
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *operands,
            None,
            None,
            rows,
            keys,
            0.0,
            triangular,
            unused,
            unused,
            scale=scale,
        )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


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


def pad_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernels need of q, k, v: unit stride and one size in the head dim.

    On a GPU the size is a multiple of 8. Padding with zeros changes neither the scores
    nor the first columns of the outputs.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    dim = max(q.shape[-1], v.shape[-1])
    if q.device.type != "cpu":
        dim = -(-dim // 8) * 8
    q, k, v = (
        F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in (q, k, v)
    )
    return q, k, v
