"""Attention by hand whose queries, or whose tokens, are none of an input's sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH, HEADS = 16, 4


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of heads [B, H, S, D]."""
    return (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v


class Asking(nn.Module):
    """Queries that are made of the tokens x [B, S, WIDTH], or of a parameter."""

    def __init__(self, queries: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.queries = queries
        self.latents = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        asking = self.q(self.queries(self, x))
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for y in (asking, *self.kv(x).chunk(2, -1))
        )
        return by_hand(q, k, v).transpose(1, 2).flatten(2)


ASKING: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "class token": lambda model, x: x[:, :1],
    "mean": lambda model, x: x.mean(1, keepdim=True),
    "latents": lambda model, x: model.latents.expand(x.shape[0], -1, -1),  # type: ignore[union-attr, operator]
}


class Captions(nn.Module):
    """Patches [B, 3, 16, 16] attend by hand before ids [B, S] come to them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, WIDTH)
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, ids: Tensor, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([tokens + by_hand(tokens, tokens, tokens), self.words(ids)], 1)
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        return x + y.transpose(1, 2).flatten(2)


class RowsFlattened(nn.Module):
    """Convolutions and a norm of tokens flattened with their batch, as LeViT has them.

    The image is [B, 3, rows, 16], and attention is over rows and columns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, 2, 1), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3, 2, 1)
        )
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.BatchNorm1d(3 * WIDTH)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        qkv = self.qkv(x)
        qkv = self.norm(qkv.flatten(0, 1)).reshape_as(qkv)
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv.chunk(3, -1)
        )
        return x + by_hand(q, k, v).transpose(1, 2).flatten(2)


class Rows(nn.Module):
    """The twin: attention within each row of x [B, rows, 8, WIDTH] stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + by_hand(*self.qkv(x).chunk(3, -1))
