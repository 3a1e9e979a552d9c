"""Attention in plain matrix products: any mask, any device, all scores in memory.

Legend as in block_attention.py; g is H // G, and rows that share a key head are taken
together, [B, G, g * R, ...]. A mask is additive, as block_attention takes it. All is
computed in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.ops.step.score_mod import BlockScoreMod

HIDDEN = float("-inf")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of accumulated steps: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def math_forward(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
    score_mod: BlockScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, R, E] and lse [B, H, R]; rows without a key give 0 and -inf.

    dropout: what weights are multiplied by, [B, H, R, K]; the lse is without it.
    """
    B, H, R, _ = q_BHRD.shape
    scores = _scores(q_BHRD, k_BGKD, scale, softcap)
    scores = _masked(scores, mask, (B, H, R), score_mod)
    lse = scores.logsumexp(-1, keepdim=True)
    # Not exp(scores - lse): of a large lse rounding leaves few digits of the weights.
    weights = scores.softmax(-1).masked_fill_(lse == HIDDEN, 0)
    if dropout is not None:
        weights.view(B, H, R, -1).mul_(dropout)
    out = weights @ v_BGKE.to(scores.dtype)
    return out.reshape(B, H, R, v_BGKE.shape[-1]), lse.reshape(B, H, R)


def math_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    lse_BHR: Tensor,
    delta_BHR: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
    score_mod: BlockScoreMod | None = None,
    replaced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq [B, H, R, D], dk [B, G, K, D], dv [B, G, K, E] and the mask's gradient.

    That is [B, H, R, K]; with a score_mod it is the gradient of its table instead. lse
    is over all keys; delta: see row_dots. replaced: given for rows whose scores the
    mask loses, bool [B or 1, H or 1, R, K], where the mask stands in their place.
    """
    heads, (B, H, R, _) = k_BGKD.shape[1], q_BHRD.shape
    scores = _scores(q_BHRD, k_BGKD, scale, softcap)
    slope = 1 - (scores / softcap) ** 2 if softcap else None
    before = scores
    if replaced is not None:
        scores = torch.zeros_like(scores)
    scores = _masked(scores, mask, (B, H, R), score_mod)
    q, grad, lse, delta = (
        group_rows(x, heads).to(scores.dtype)
        for x in (q_BHRD, grad_BHRE, lse_BHR.unsqueeze(-1), delta_BHR.unsqueeze(-1))
    )
    p = (scores - finite(lse)).exp()
    dp, dropped = grad @ v_BGKE.to(scores.dtype).mT, p
    if dropout is not None:
        dp.view(B, H, R, -1).mul_(dropout)
        dropped = (p.view(B, H, R, -1) * dropout).view(p.shape)
    ds = p * (dp - delta)
    inner = ds if slope is None else ds * slope  # by tanh
    of_mask = ds.reshape(B, H, R, k_BGKD.shape[2])
    if score_mod is not None:
        inner, of_mask = score_mod.backward(before.view(of_mask.shape), of_mask)
        inner = inner.reshape(p.shape).masked_fill(p == 0, 0)  # it may be NaN there
    if replaced is not None:
        inner = inner.view(of_mask.shape).masked_fill(replaced, 0).view(p.shape)
    dq = (inner @ k_BGKD.to(ds.dtype) * scale).reshape(q_BHRD.shape)
    return dq, inner.mT @ q * scale, dropped.mT @ grad, of_mask


def additive(hidden: Tensor | None, like: Tensor) -> Tensor | None:
    """Return the mask that hides these keys, in the accumulation dtype of `like`."""
    if hidden is None:
        return None
    zeros = torch.zeros_like(hidden, dtype=accumulation_dtype(like.dtype))
    return zeros.masked_fill_(hidden, HIDDEN)


def hidden_above_diagonal(rows: int, keys: int, device: torch.device) -> Tensor:
    """Make the mask of a triangular block: row i sees its first i + 1 keys."""
    return torch.ones(rows, keys, dtype=torch.bool, device=device).triu(1)


def _scores(q_BHRD: Tensor, k_BGKD: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the scaled scores, [B, G, g * R, K] in the accumulation dtype."""
    dtype, heads = accumulation_dtype(q_BHRD.dtype), k_BGKD.shape[1]
    scores = group_rows(q_BHRD, heads).to(dtype) @ k_BGKD.to(dtype).mT * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(
    scores: Tensor,
    mask: Tensor | None,
    rows: tuple[int, int, int],
    score_mod: BlockScoreMod | None,
) -> Tensor:
    """Mask the scores, in place unless there is a score_mod; rows: B, H and R."""
    own = scores.view(*rows, scores.shape[-1])
    if score_mod is None:
        if mask is not None:
            # Hidden ones that are NaN or inf, too: -inf added to these is NaN.
            own.add_(mask).masked_fill_(mask == HIDDEN, HIDDEN)
        return scores
    own = score_mod.forward(own)
    if mask is not None:
        own = own.masked_fill(mask == HIDDEN, HIDDEN)  # NaN too
    return own.reshape(scores.shape)


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
