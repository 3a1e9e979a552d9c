"""Attention whose first keys are padding, hidden by the lowest number.

The first queries see nothing else: their scores are lost in that number, of which
autograd does not know where it is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.forms.sink_forms import causal, lowest

PADDING = 3


def is_padding(q: Tensor) -> Tensor:
    return torch.arange(q.shape[-2], device=q.device) < PADDING


def lost(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As "eager" models of transformers with padding on the left."""
    hidden = ~causal(q) | is_padding(q)
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, lowest(q))
    return (q @ k.mT * 0.5 + mask).softmax(-1) @ v


def lost_with_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Gemma 2."""
    hidden = ~causal(q) | is_padding(q)
    mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, lowest(q))
    scores = torch.tanh(q @ k.mT * 0.5 / 3.0) * 3.0
    return (scores + mask).softmax(-1) @ v


def lost_and_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As older GPT-2: what is causal replaces scores, and padding is added to them."""
    low = torch.full((), lowest(q), dtype=q.dtype, device=q.device)
    padding = torch.zeros(1, 1, 1, q.shape[-2], dtype=q.dtype, device=q.device)
    padding = padding.masked_fill(is_padding(q), lowest(q))
    scores = torch.where(causal(q), q @ k.mT * 0.5, low)
    return (scores + padding).softmax(-1) @ v


FORMS = (lost, lost_with_softcap, lost_and_filled)
