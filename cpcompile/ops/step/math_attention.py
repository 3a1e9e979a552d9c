"""Attention in plain matrix products: any mask, any device, all scores in memory.

Legend as in block_attention.py; g is H // G, and rows that share a key head are taken
together, [B, G, g * R, ...]. `hidden` is a bool mask [R, K] of keys that a row does not
see, or None. Everything is computed in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulated steps: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def math_forward(
    q_BHRD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, hidden: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, R, E] and lse [B, H, R]; rows without a key give 0 and -inf."""
    B, H, R, _ = q_BHRD.shape
    scores = _scores(q_BHRD, k_BGKD, hidden, scale)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - finite(lse)).exp() @ v_BGKE.to(scores.dtype)
    return out.reshape(B, H, R, v_BGKE.shape[-1]), lse.reshape(B, H, R)


def math_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    lse_BHR: Tensor,
    delta_BHR: Tensor,
    hidden: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B, H, R, D], dk [B, G, K, D] and dv [B, G, K, E].

    lse is over all keys; delta: see row_dots.
    """
    kv_heads = k_BGKD.shape[1]
    scores = _scores(q_BHRD, k_BGKD, hidden, scale)
    q, grad, lse, delta = (
        group_rows(x, kv_heads).to(scores.dtype)
        for x in (q_BHRD, grad_BHRE, lse_BHR.unsqueeze(-1), delta_BHR.unsqueeze(-1))
    )
    p = (scores - finite(lse)).exp()
    dp = grad @ v_BGKE.to(scores.dtype).mT
    ds = p * (dp - delta) * scale
    dq = (ds @ k_BGKD.to(ds.dtype)).reshape(q_BHRD.shape)
    return dq, ds.mT @ q, p.mT @ grad


def hidden_above_diagonal(rows: int, keys: int, device: torch.device) -> Tensor:
    """Make the mask of a triangular block: row i sees its first i + 1 keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1)


def _scores(
    q_BHRD: Tensor, k_BGKD: Tensor, hidden: Tensor | None, scale: float
) -> Tensor:
    """Compute the scaled scores [B, G, g * R, K], with -inf for hidden keys."""
    dtype = accumulation_dtype(q_BHRD.dtype)
    q = group_rows(q_BHRD, k_BGKD.shape[1]).to(dtype)
    scores = q @ k_BGKD.to(dtype).mT * scale
    if hidden is not None:
        heads, rows = q_BHRD.shape[1] // max(k_BGKD.shape[1], 1), q_BHRD.shape[2]
        by_head = scores.unflatten(2, (heads, rows))
        by_head.masked_fill_(hidden, float("-inf"))
    return scores


def finite(lse: Tensor) -> Tensor:
    """Return lse with 0 for rows without a key, where it is -inf.

    Then exp(score - 0) is the 0 it should be.
    """
    return torch.where(lse == float("-inf"), 0.0, lse)


def group_rows(x_BHRD: Tensor, kv_heads: int) -> Tensor:
    """Group rows that share a key head: [B, H, R, D] -> [B, G, g * R, D]."""
    # Of no heads torch could not work out a size of -1.
    sizes = (kv_heads, x_BHRD.shape[1] // max(kv_heads, 1))
    grouped: Tensor = x_BHRD.unflatten(1, sizes).flatten(2, 3)
    return grouped
