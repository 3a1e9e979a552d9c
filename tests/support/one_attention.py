"""A model of one attention, and losses that read its logits."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

HEADS, WIDTH = 4, 32


class Model(nn.Module):
    """An embedding, one attention and a head; `loss` reads the logits."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], vocabulary: int = 64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        self.loss = loss

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        qkv = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*qkv.chunk(3, dim=1), is_causal=True)
        return self.loss(self.head(x + y.transpose(1, 2).flatten(2)), tokens)


def mean_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def sliced(logits: Tensor, tokens: Tensor) -> Tensor:
    """Gathers all logits for an index; the backward of the head is of all tokens."""
    log_p = logits[:, tokens[0, 1:].argsort()].log_softmax(-1)
    return log_p.gather(2, tokens[:, 1:, None]).squeeze(2).sum()
