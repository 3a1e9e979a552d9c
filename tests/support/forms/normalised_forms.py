"""Images that are normalised by means over positions, between convolutions."""

from __future__ import annotations

import copy

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH = 8

NORMS = {
    "batch": lambda: nn.BatchNorm2d(WIDTH),
    "batch, no parameters": lambda: nn.BatchNorm2d(WIDTH, affine=False),
    "batch, nothing kept": lambda: nn.BatchNorm2d(WIDTH, track_running_stats=False),
    "batch, quick": lambda: nn.BatchNorm2d(WIDTH, eps=0.1, momentum=0.7),
    "instance": lambda: nn.InstanceNorm2d(WIDTH),
    "instance, kept": lambda: nn.InstanceNorm2d(
        WIDTH, affine=True, track_running_stats=True
    ),
    "group": lambda: nn.GroupNorm(2, WIDTH),
    "group of all": lambda: nn.GroupNorm(1, WIDTH, affine=False),
    "group of one": lambda: nn.GroupNorm(WIDTH, WIDTH),
}


class Normalised(nn.Module):
    """x: [B, 3, H, W] -> [B, 5]. Values are far from zero, unlike their differences."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 5, stride=2, padding=2)
        self.norm = NORMS[name]()
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.again = copy.deepcopy(self.norm)
        self.act, self.out = nn.PReLU(WIDTH), nn.Linear(WIDTH, 5)
        for p in self.parameters():
            if p.ndim == 1:
                nn.init.normal_(p, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.first(x) + 20))
        y = self.act(self.again(self.second(y)))
        return self.out(y.mean((2, 3)))


class Rows(nn.Module):
    """x: [B, 3, H, W] -> [B, 5]: a stem, tokens of its grid, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU6(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(WIDTH, 16, 1),
        )
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).flatten(2).mT
        q, k, v = (
            part.unflatten(-1, (2, 8)).transpose(1, 2)
            for part in self.qkv(y).chunk(3, -1)
        )
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.out(y.mean(1))


class FlattenedBatch(nn.Module):
    """x: [B, 3, H, W] -> [B, 5]: a batch norm of tokens, flattened with their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).flatten(2).mT
        y = self.norm(y.flatten(0, 1)).reshape_as(y)
        return self.out(y).relu().mean(1)


class Patches(nn.Module):
    """x: [B, 3, H, W] -> [B, 5]: one convolution makes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 5)

    forward = Rows.forward

    @property
    def stem(self) -> nn.Module:
        return self.patches
