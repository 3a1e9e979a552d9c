"""Attention of whole tensors as models write it out, in products and a softmax.

It stands in graphs for attention that was written by hand, until it is rewritten to an
operator; what cannot be rewritten runs as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.score_mod import BlockScoreMod


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    score_mod: str = "",
    values: Tensor | None = None,
) -> Tensor:
    """Compute what F.scaled_dot_product_attention does, but for two differences.

    A mask may have any floating dtype, and a row that sees no key gives NaN, as a
    softmax of -inf does. Differentiable; scores are in float32 (float64 for float64).

    softcap: c > 0 makes c * tanh(s / c) of the scaled scores s, before the mask.
    score_mod, values: a function of the scores and what it reads, see score_mod.py; it
        hides what the mask hides, so that weights of a row without a key are 0.
    sinks: [H], one more score per row that takes weight, and has no value.
    """
    masks = (attn_mask, is_causal, scale, enable_gqa, softcap, score_mod, values)
    scores = _scores(query, key, *masks)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    softmax = torch._safe_softmax if score_mod else torch.softmax
    weights = softmax(scores, -1)[..., : key.shape[-2]].to(query.dtype)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return F.dropout(weights, dropout_p) @ value


def log_sum_exp(
    attention: Tensor,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float = 0.0,
    score_mod: str = "",
    values: Tensor | None = None,
) -> Tensor:
    """Compute the log-sum-exp of the scores of plain_attention(query, key, ...).

    `attention` is the result of that call. It is not read; it says in a graph whose
    scores these are. The log-sum-exp is in the accumulation dtype; a row that sees no
    key gives -inf.
    """
    masks = (attn_mask, False, scale, enable_gqa, softcap, score_mod, values)
    return _scores(query, key, *masks).logsumexp(-1)


def _scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    softcap: float,
    score_mod: str,
    values: Tensor | None,
) -> Tensor:
    """Compute the scores in the accumulation dtype, under the mask."""
    dtype = accumulation_dtype(query.dtype)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.mT).to(dtype) * factor
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if values is not None:
        rows = torch.arange(scores.shape[2], dtype=torch.int32, device=scores.device)
        scores = BlockScoreMod(score_mod, values, rows, 0).forward(scores)
    if is_causal:
        hidden = torch.ones_like(scores[..., :, :], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores
