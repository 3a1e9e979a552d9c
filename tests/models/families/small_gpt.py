"""The usual small GPT in plain PyTorch, as users write it; nothing here knows of cp."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, S, C = x.shape
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, S, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, S, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, S, self.heads, C // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(B, S, C))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallGPT(nn.Module):
    """Byte-level GPT.

    checkpointed: layers that are recomputed in the backward. attention: makes that of a
    layer, of width and heads.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
        context: int = 2048,
        checkpointed: tuple[int, ...] = (),
        tied: bool = True,
        attention: Callable[[int, int], nn.Module] = Attention,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, attention(width, heads)) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointed = checkpointed
        if tied:
            self.head.weight = self.tokens.weight

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for number, block in enumerate(self.blocks):
            if number in self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits, None
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), shifted.reshape(-1))
        return logits, loss
