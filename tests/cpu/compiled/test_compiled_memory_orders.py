"""Programs in which neighbours of attention choose how its operands lie in memory.

Inductor gives a result the order that its reader wants: channels last for a
convolution, columns for a transposed product. What attention computes may not depend
on it, forward and backward. The exact result is that of one process in float64, the
rough one that of one process in float32; see Note [Derived bounds].
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config as inductor_config

from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviation, largest

WIDTH, HEADS, BATCH, LENGTH = 48, 4, 2, 64


class Two(nn.Module):
    """Two attention calls with a neighbour between them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x, 0)
        return self.attend(self.between(x), 1).square().mean()

    def attend(self, x: Tensor, layer: int) -> Tensor:
        parts = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(2)

    is_causal = True

    def between(self, x: Tensor) -> Tensor:
        return x


class Convolution(Two):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def between(self, x):
        return x + self.conv(x.mT).mT


class Full(Convolution):
    is_causal = False


class Image(Two):
    """Tokens as an image, which convolutions take with channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)

    def between(self, x):
        image = x.mT.unflatten(2, (8, LENGTH // 8))
        image = image.contiguous(memory_format=torch.channels_last)
        return x + self.conv(image).flatten(2).mT


class Columns(Two):
    """Products that read and write the transposed activation."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(WIDTH, WIDTH) * WIDTH**-0.5)

    def between(self, x):
        return x + (self.left @ x.mT).mT


class HeadsLast(Two):
    """q, k and v whose heads, or whose tokens, lie last in memory."""

    def attend(self, x, layer):
        parts = self.qkv[layer](x).chunk(3, -1)
        q, k = (y.unflatten(-1, (-1, HEADS)).permute(0, 3, 1, 2) for y in parts[:2])
        v = parts[2].mT.contiguous().unflatten(1, (HEADS, -1)).mT
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(0, 2, 3, 1).flatten(2)


class Expanded(Two):
    """One head of keys for all, and rows that are one row."""

    def attend(self, x, layer):
        parts = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        k = k[:, :1].expand(-1, HEADS, -1, -1)
        v = v.mean(-1, keepdim=True).expand(-1, -1, -1, v.shape[-1])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Window(Convolution):
    """The same under a mask that the passes read."""

    def attend(self, x, layer):
        parts = self.qkv[layer](x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        row = torch.arange(x.shape[1])
        mask = (row[:, None] >= row) & (row[:, None] < row + 9)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.transpose(1, 2).flatten(2)


PROGRAMS = {
    x.__name__: x
    for x in (Convolution, Full, Image, Columns, HeadsLast, Expanded, Window)
}
SETTINGS = {
    "usual": {},
    "channels last": {"force_layout_optimization": True},
    "no layouts": {"layout_optimization": False},
}


def run(
    name: str, options: dict, dtype: torch.dtype, setting: str = "usual"
) -> dict[str, Tensor]:
    """Loss and gradients; in one process, as it is written, without options."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = PROGRAMS[name]().to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH).to(dtype).requires_grad_()
    step = torch.compile(model, backend="cp", options=options) if options else model
    with inductor_config.patch(SETTINGS[setting]):
        loss = step(x)
        loss.backward()
    found = {"loss": loss.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return {k: v for k, v in found.items() if v is not None}


def run_both(name: str, strategy: str, setting: str) -> list[Deviation]:
    mesh = sequence_mesh(dist.get_world_size())
    options = {"mesh": mesh, "strategy": strategy}
    exact = run(name, {}, torch.float64)
    rough = run(name, {}, torch.float32)
    got = run(name, options, torch.float32, setting)
    # What cancels to a gradient of zero, as that of a key's bias, was as large as this.
    floor = max(largest(x) for k, x in exact.items() if k != "loss")
    return [
        deviation(k, got[k], exact[k], rough[k], 1.0 if k == "loss" else floor)
        for k in exact
    ]


DEFAULT = [("Convolution", "ring", "usual"), ("HeadsLast", "ring", "usual")]
OTHERS = [
    (name, strategy, setting)
    for name in PROGRAMS
    for strategy in ("ring", "all_gather", "ulysses", "hybrid")
    for setting in SETTINGS
    if strategy == "ring" or setting == "usual"
]
CASES = [*DEFAULT, *(x for x in OTHERS if x not in DEFAULT)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "strategy", "setting"), CASES)
def test_a_neighbour_changes_nothing(pools, name, strategy, setting):
    pool = pools[4 if strategy == "hybrid" else 2]
    for deviations in pool.run(run_both, name, strategy, setting, timeout=240):
        check(deviations)
