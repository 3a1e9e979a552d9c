"""Models with convolutions over the tokens between their attention."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH = 16
VOCABULARY = 23


class Block(nn.Module):
    """x [B, S, C] -> attention -> a convolution of [B, C, S]."""

    def __init__(self, convolution: nn.Module, causal: bool) -> None:
        super().__init__()
        self.causal, self.convolution = causal, convolution
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1))
        q, k, v = (y[:, :, i].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(-2))
        return x + F.silu(self.convolution(self.other_norm(x).mT)).mT


class Sliced(nn.Conv1d):
    """As in Mamba: zeros on both sides, and what they give after is cut off."""

    def __init__(self, taps: int, **kwargs) -> None:
        after = (taps - 1) * kwargs.get("dilation", 1)
        super().__init__(WIDTH, WIDTH, taps, padding=after, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., : x.shape[-1]]


class Padded(nn.Conv1d):
    """Zeros in front of the call."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.kernel_size[0] - 1, 0)))


class Called(nn.Conv1d):
    """As in LFM2: numbers that are no tuples, by their names."""

    def forward(self, x: Tensor) -> Tensor:
        taps = {"weight": self.weight, "bias": self.bias, "groups": WIDTH}
        return F.conv1d(x, padding=self.kernel_size[0] - 1, **taps)[:, :, : x.shape[2]]


class Conformer(nn.Module):
    """Over channels, over tokens, and over channels again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.middle = nn.Conv1d(WIDTH, WIDTH, 7, padding="same", groups=WIDTH)
        self.last = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.silu(self.middle(F.glu(self.first(x), 1))))


class Grid(nn.Module):
    """The tokens are those of an image of 4 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.unflatten(-1, (-1, 4))).flatten(-2)


def one(taps: int, **kwargs) -> nn.Module:
    return nn.Conv1d(WIDTH, WIDTH, taps, **kwargs)


# By name: what makes the convolution, and whether the model is causal.
FORMS = {
    "centred": (lambda: one(3, padding=1), False),
    "dilated": (lambda: one(3, padding=4, dilation=4, bias=False), False),
    "even": (lambda: one(4, padding="same"), False),
    "conformer": (Conformer, False),
    "sliced": (lambda: Sliced(4, groups=WIDTH), True),
    "sliced_dilated": (lambda: Sliced(3, dilation=2), True),
    "padded": (lambda: Padded(WIDTH, WIDTH, 4, groups=WIDTH), True),
    "called": (lambda: Called(WIDTH, WIDTH, 3, groups=WIDTH), True),
    "grid": (Grid, False),
}
# What changes the number of tokens, or pads by other numbers: see strided_forms.py.
TWINS = {
    "reflected": (lambda: one(3, padding=1, padding_mode="reflect"), False),
    "shrinking": (
        lambda: nn.Sequential(one(3), nn.ConstantPad1d((1, 1), 0.5)),
        False,
    ),
}


class Model(nn.Module):
    """Logits of tokens [B, S]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, causal = (FORMS | TWINS)[name]
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(make(), causal) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
