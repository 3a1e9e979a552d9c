"""Modules that change the number of tokens between two attention calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH = 16
COLUMNS = 3  # of a grid


def of_channels(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Make a module of [B, C, S] one of [B, S, C]."""
    return lambda x: module(x.mT).mT


def of_grid(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Make a module of images one of [B, rows * columns, C]."""

    def call(x: Tensor) -> Tensor:
        return module(x.mT.unflatten(-1, (-1, COLUMNS))).flatten(2).mT

    return call


def conv(*args, **kwargs) -> nn.Module:
    return nn.Conv1d(WIDTH, WIDTH, *args, **kwargs)


def up(*args, **kwargs) -> nn.Module:
    return nn.ConvTranspose1d(WIDTH, WIDTH, *args, **kwargs)


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def windows(size: int, step: int) -> nn.Module:
    return Call(lambda x: x.unfold(2, size, step).mean(-1))


def resized(**given) -> nn.Module:
    return Call(lambda x: F.interpolate(x, **given))


OF_CHANNELS = {
    "halves": lambda: conv(3, stride=2, padding=1),
    "patches": lambda: conv(4, stride=4, bias=False),
    "every second": lambda: conv(1, stride=2),
    "single maxima": lambda: nn.MaxPool1d(1, 2),
    "rest": lambda: conv(2, stride=3),
    "dilated": lambda: conv(3, stride=2, dilation=2, padding=2),
    "depthwise": lambda: conv(5, stride=2, groups=WIDTH),
    "shrinks": lambda: conv(3),
    "grows": lambda: conv(3, padding=2),
    "reflects": lambda: conv(3, padding=1, padding_mode="reflect"),
    "means": lambda: nn.AvgPool1d(2),
    "padded means": lambda: nn.AvgPool1d(3, 2, 1),
    "moving means": lambda: nn.AvgPool1d(13, 1),
    "maxima": lambda: nn.MaxPool1d(3, 2, 1),
    "dilated maxima": lambda: nn.MaxPool1d(2, 2, 0, dilation=3),
    "equal parts": lambda: nn.AdaptiveAvgPool1d(6),
    "overlapping": lambda: windows(4, 2),
    "with a rest": lambda: windows(5, 5),
    "doubles": lambda: up(4, stride=2, padding=1),
    "triples": lambda: up(5, stride=3, padding=2, output_padding=2, groups=4),
    "spreads": lambda: up(3, bias=False, dilation=2),
    "repeats": lambda: resized(scale_factor=2),
    "repeats for a size": lambda: Call(
        lambda x: F.interpolate(x, size=4 * x.shape[-1])
    ),
}
OF_GRID = {
    "grid": lambda: nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
    "grid of patches": lambda: nn.Conv2d(WIDTH, WIDTH, (2, 3), stride=(2, 3)),
    "grid maxima": lambda: nn.MaxPool2d(3, (2, 1), 1),
    "larger grid": lambda: nn.ConvTranspose2d(WIDTH, WIDTH, 2, stride=2),
    "repeated grid": lambda: resized(scale_factor=2),
}
FORMS = OF_CHANNELS | OF_GRID
# Not of windows that begin at equal distances, or of other numbers than zeros.
TWINS = {
    "counted means": lambda: nn.AvgPool1d(3, 2, 1, count_include_pad=False),
    "nearly four times": lambda: resized(scale_factor=4.004),  # not each so often
    "three times": lambda: resized(scale_factor=3),
    "wide means": lambda: nn.AvgPool1d(31, 1, 15),  # of all tokens
    "between tokens": lambda: resized(scale_factor=2.0, mode="linear"),
}


class Model(nn.Module):
    """x: [B, S, C]; tokens of another length are attended to after the first call."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.changed = (FORMS | TWINS)[name]()
        self.bring = (of_grid if name in OF_GRID else of_channels)(self.changed)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        y = self.qkv(x).unflatten(-1, (3, 2, -1))
        q, k, v = (y[:, :, i].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(self.bring(self.attend(x)))
        return torch.sin(y).square().sum(1)


class Image(nn.Module):
    """x: [B, 3, H, W], whose rows are shared out; stem, patches, attention and back."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 1, 1),
            nn.Conv2d(8, WIDTH, 3, stride=2, padding=1),
            nn.Upsample(scale_factor=2),
            nn.AvgPool2d(2),
        )
        self.patches = nn.Conv2d(WIDTH, WIDTH, 4, stride=4)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.ConvTranspose2d(WIDTH, 4, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.patches(self.stem(x))
        y = grid.flatten(2).mT
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(y).chunk(3, -1)
        )
        y = y + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.back(y.mT.unflatten(-1, grid.shape[-2:])).square().mean((-1, -2))
