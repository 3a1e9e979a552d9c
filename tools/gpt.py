"""A small byte-level GPT in plain PyTorch, as users write it; nothing knows of cp."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

BYTES = 256
IGNORED = -100  # the label that F.cross_entropy leaves out


class Block(nn.Module):
    """Attention and a perceptron, each after a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """A predictor of the next byte; `context` is its longest sequence, in tokens."""

    def __init__(self, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of tokens [B, S] (int64), predicted by those before."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        labels = F.pad(tokens, (0, 1), value=IGNORED)[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
