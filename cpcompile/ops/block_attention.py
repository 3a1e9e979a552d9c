"""Attention of some query rows on one block of keys: aten's kernels, or plain math.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Key and value heads are never repeated.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.layout import Block

aten = torch.ops.aten


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which steps are accumulated: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def uses_flash(q: Tensor) -> bool:
    """Whether aten's CPU flash kernel runs this call; else the math path does."""
    return q.device.type == "cpu" and q.dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )


def block_attention(
    q_BHRD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, triangular: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one block.

    Returns out [B, H, R, E] in q's dtype, normalised over the keys of this block, and
    the log-sum-exp of the scaled scores, [B, H, R] in the accumulation dtype. There
    must be at least one row and one key; then every row sees a key.
    """
    if not uses_flash(q_BHRD):
        return _math_forward(q_BHRD, k_BGKD, v_BGKE, triangular, scale)
    value_dim = v_BGKE.shape[-1]
    q_BHRD, k_BGKD, v_BGKE = _pad_head_dims(q_BHRD, k_BGKD, v_BGKE)
    out_BHRD, lse_BHR = aten._scaled_dot_product_flash_attention_for_cpu(
        q_BHRD, k_BGKD, v_BGKE, 0.0, triangular, scale=scale
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the *final* out and lse of its rows.

    With the lse over all keys, exp(score - lse) is the true probability, so the
    gradients of blocks simply add up. Returns dq [B, H, R, D], dk [B, G, K, D] and
    dv [B, G, K, E] in q's dtype (math path: accumulation dtype).
    """
    if not uses_flash(q_BHRD):
        return _math_backward(
            grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR, triangular, scale
        )
    head_dim, value_dim = q_BHRD.shape[-1], v_BGKE.shape[-1]
    q_BHRD, k_BGKD, v_BGKE = _pad_head_dims(q_BHRD, k_BGKD, v_BGKE)
    pad = v_BGKE.shape[-1] - value_dim
    if pad:
        grad_BHRE, out_BHRE = F.pad(grad_BHRE, (0, pad)), F.pad(out_BHRE, (0, pad))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_BHRE,
        q_BHRD,
        k_BGKD,
        v_BGKE,
        out_BHRE,
        lse_BHR,
        0.0,
        triangular,
        scale=scale,
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def take_rows(x: Tensor, block: Block) -> Tensor:
    """The query rows of `block`: x is [B, H, rows, ...]."""
    return x.narrow(2, block.row, block.rows)


def take_keys(x: Tensor, block: Block) -> Tensor:
    """The keys of `block`: x is [B, G, keys, ...]."""
    return x.narrow(2, block.key, block.keys)


def _pad_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel needs of q, k, v: unit stride and one size in the head dim.

    Padding with zeros changes neither the scores nor the first columns of the outputs.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    if value_dim < head_dim:
        v = F.pad(v, (0, head_dim - value_dim))
    elif head_dim < value_dim:
        pad = (0, value_dim - head_dim)
        q, k = F.pad(q, pad), F.pad(k, pad)
    return q, k, v


def _group_rows(x_BHRD: Tensor, kv_heads: int) -> Tensor:
    """[B, H, R, D] -> [B, G, (H // G) * R, D]: rows that share a key head."""
    grouped: Tensor = x_BHRD.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return grouped


def _probability_inputs(
    q_BHRD: Tensor, k_BGKD: Tensor, triangular: bool, scale: float
) -> Tensor:
    """Scaled scores [B, G, (H // G) * R, K] in the accumulation dtype."""
    rows, keys, kv_heads = q_BHRD.shape[2], k_BGKD.shape[2], k_BGKD.shape[1]
    dtype = accumulation_dtype(q_BHRD.dtype)
    q = _group_rows(q_BHRD, kv_heads).to(dtype)
    scores = q @ k_BGKD.to(dtype).transpose(-1, -2) * scale
    if triangular:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1)
        scores.unflatten(2, (-1, rows)).masked_fill_(hidden, float("-inf"))
    return scores


def _math_forward(
    q_BHRD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, triangular: bool, scale: float
) -> tuple[Tensor, Tensor]:
    B, H, R, _ = q_BHRD.shape
    scores = _probability_inputs(q_BHRD, k_BGKD, triangular, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp() @ v_BGKE.to(scores.dtype)
    return (
        out.reshape(B, H, R, v_BGKE.shape[-1]).to(q_BHRD.dtype),
        lse.reshape(B, H, R),
    )


def _math_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    triangular: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads = k_BGKD.shape[1]
    scores = _probability_inputs(q_BHRD, k_BGKD, triangular, scale)
    dtype = scores.dtype
    lse = _group_rows(lse_BHR.unsqueeze(-1).to(dtype), kv_heads)
    grad = _group_rows(grad_BHRE, kv_heads).to(dtype)
    out = _group_rows(out_BHRE, kv_heads).to(dtype)
    p = (scores - lse).exp()
    dv = p.transpose(-1, -2) @ grad
    dp = grad @ v_BGKE.to(dtype).transpose(-1, -2)
    ds = p * (dp - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (ds @ k_BGKD.to(dtype)).reshape(q_BHRD.shape)
    dk = ds.transpose(-1, -2) @ _group_rows(q_BHRD, kv_heads).to(dtype)
    return dq, dk, dv
