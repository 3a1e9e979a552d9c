"""Attention with sinks as models write it out: as attention_pattern_forms.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal(q: Tensor) -> Tensor:
    """True where a query sees a key."""
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).tril()


def lowest(q: Tensor) -> float:
    return torch.finfo(q.dtype).min


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """As gpt-oss: a score per head without a value, and scores less their maximum."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5
    scores = scores.masked_fill(~causal(q), lowest(q))
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, column], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    weights = F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]
    return torch.matmul(F.dropout(weights, p=0.0, training=True), v)


def with_sinks_everywhere(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    return torch.cat([q @ k.mT, column], -1).softmax(-1)[..., :-1] @ v


def sinks_of_hidden_rows(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The first queries see nothing but sinks, as those of padding on the left."""
    hidden = ~causal(q) | (torch.arange(q.shape[-2]) < 3)
    scores = (q @ k.mT) * 0.5 + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(
        hidden, lowest(q)
    )
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def sinks_and_low_bias(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The same by -1e9, in a bias of pairs that is no function of a distance."""
    at = torch.arange(q.shape[-2], dtype=q.dtype)
    bias = (at[:, None] * at * 0.37).sin()
    bias = bias.masked_fill(~causal(q) | (at < 3), -1e9)
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    scores = q @ k.mT + bias
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def shifted_before_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Scores are shifted, and the sinks are not."""
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    scores = q @ k.mT
    scores = scores - scores.amax(-1, keepdim=True)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def raised_before_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[-2], 1)
    return torch.cat([q @ k.mT + 1.0, column], -1).softmax(-1)[..., :-1] @ v


FORMS = (with_sinks, with_sinks_everywhere, sinks_of_hidden_rows, sinks_and_low_bias)
TWINS = (shifted_before_sinks, raised_before_sinks)
