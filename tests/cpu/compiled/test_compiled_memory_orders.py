"""Programs in which neighbours of attention choose how its operands lie in memory.

Inductor gives a result the order that its reader wants: channels last for a
convolution, columns for a transposed product. What attention computes may not depend
on it, forward and backward. The exact result is that of one process in float64, the
rough one that of one process in float32; see Note [Derived bounds].
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.cpu.against_one_process import run
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import Values, check, deviations, in_one_process

WIDTH, HEADS, BATCH, LENGTH = 48, 4, 2, 64


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x, 0)
        return self.attend(self.between(x), 1).square().mean()

    def attend(self, x: Tensor, layer: int) -> Tensor:
        parts = self.qkv[layer](x).chunk(3, -1)
        y = F.scaled_dot_product_attention(*self.heads(*parts), **self.masked())
        return y.transpose(1, 2).flatten(2)

    def heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)

    def masked(self) -> dict[str, Any]:
        return {"is_causal": True}

    def between(self, x: Tensor) -> Tensor:
        return x


class Convolution(Two):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def between(self, x):
        return x + self.conv(x.mT).mT


class Image(Two):
    """Tokens as an image, which convolutions take with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def between(self, x):
        image = x.mT.unflatten(2, (8, LENGTH // 8))
        image = image.contiguous(memory_format=torch.channels_last)
        return x + self.conv(image).flatten(2).mT


class HeadsLast(Two):
    """q, k and v whose heads, or whose tokens, lie last in memory."""

    def heads(self, *parts):
        q, k = (y.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2) for y in parts[:2])
        return q, k, parts[2].mT.contiguous().unflatten(1, (HEADS, -1)).mT


class Window(Convolution):
    """The same under a mask that the passes read."""

    def masked(self):
        row = torch.arange(LENGTH)
        return {"attn_mask": (row[:, None] >= row) & (row[:, None] < row + 9)}


PROGRAMS = {x.__name__: x for x in (Convolution, Image, HeadsLast, Window)}
SETTINGS = {
    "usual": {},
    "channels last": {"force_layout_optimization": True},
    "no layouts": {"layout_optimization": False},
}
CASES = [
    (name, strategy, setting)
    for name in PROGRAMS
    for strategy in ("ring", "all_gather", "ulysses", "hybrid")
    for setting in SETTINGS
    if strategy == "ring" or setting == "usual"
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "strategy", "setting"), CASES)
@on_ranks(lambda strategy: 4 if strategy == "hybrid" else 2, timeout=240)
def test_a_neighbour_changes_nothing(name, strategy, setting):
    """In float32, whose kernels are others than those of float64."""
    model, x = PROGRAMS[name](), torch.randn(BATCH, LENGTH, WIDTH)
    compiled = compiled_on(
        dist.get_world_size(), model, inner="inductor", strategy=strategy
    )

    def step(alone: nn.Module) -> Values:
        given = x.to(alone.qkv[0].weight.dtype).requires_grad_()
        return run(alone, given, alone)

    values = in_one_process(step, model)
    with inductor_config.patch(SETTINGS[setting]):
        check(deviations(run(compiled, x.requires_grad_(), model), *values))
