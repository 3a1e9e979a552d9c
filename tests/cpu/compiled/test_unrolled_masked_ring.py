"""Rings under a mask that Inductor sees as steps equal rings in a loop.

Every message is proven to be hidden behind a step in the code of every rank. Numbers
are float64, so that what differs from one process is rounding.

The same steps run on the same values in the same order, but bits may differ: Inductor
hands keys to unrolled steps in the memory order of the projection, [B, S, H, D], where
the operator of a loop gets [B, H, S, D]. BLAS adds up the products of these in another
order. No sum has a thousand summands, so that both differ from each other, too, by the
bound for float64 of Note [Derived bounds] at most.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from cpcompile import config
from cpcompile.compile import compile_local as inductor
from cpcompile.compile.overlap import check_overlap
from tests.cpu.against_one_process import run
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, Values, check, deviations

HEADS, WIDTH, LONGEST = 2, 16, 64
WINDOW = 9


class Attention(nn.Module):
    """Attention under one mask, which each subclass writes as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def mask(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        return x + y.transpose(1, 2).flatten(2)


def causal(length: int) -> tuple[Tensor, Tensor, Tensor]:
    row, key = torch.arange(length)[:, None], torch.arange(length)
    return row, key, key <= row


class Window(Attention):
    def mask(self, x: Tensor) -> Tensor:
        row, key, seen = causal(x.shape[1])
        return seen & (key > row - WINDOW)


class BothSides(Attention):
    def mask(self, x: Tensor) -> Tensor:
        row, key, _ = causal(x.shape[1])
        return (key > row - WINDOW) & (key < row + WINDOW)


class Packed(Attention):
    """Documents that the data say: which chunks are needed nobody knows before."""

    def mask(self, x: Tensor) -> Tensor:
        _, _, seen = causal(x.shape[1])
        ids = (x[..., 0] > 0.5).cumsum(1)
        return seen & (ids[:, None, :, None] == ids[:, None, None])


class Holes(Packed):
    """Ids that come again, so that ranges of keys do not say it all."""

    def mask(self, x: Tensor) -> Tensor:
        _, _, seen = causal(x.shape[1])
        ids = (x[..., 0] > 0.5).cumsum(1) % 3
        return seen & (ids[:, None, :, None] == ids[:, None, None])


class Bias(Attention):
    """With a gradient; low numbers hide the first keys, and lose no scores."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, LONGEST, LONGEST))

    def mask(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        _, key, seen = causal(length)
        low = self.bias[:, :, :length, :length] - 2e3 * (key < 4)
        return low.masked_fill(~seen, -torch.inf)


def run_ring(
    make: type[Attention], length: int, world: int, layout: str, unroll: int
) -> tuple[Values, list[Deviation], list[int]]:
    """Results and gradients, their errors, and the messages of each direction."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)
    wanted = run(model, x.clone().requires_grad_(), model)
    options = {"mesh": sequence_mesh(world), "strategy": "ring"}
    options["layout"] = layout
    compiled = torch.compile(model, backend="cp", options=options, fullgraph=True)
    messages: list[int] = []

    def count(code: str) -> None:
        messages.append(len(check_overlap(code)))

    with (
        config.patch(check_overlap=True, unroll=unroll),
        mock.patch.object(inductor, "check_overlap", count),
    ):
        found = run(compiled, x.clone().requires_grad_(), model)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    return found, deviations(found, wanted), messages


# Messages with keys in the forward, where each rank has at least a window.
HOPS = {Window: 1, BothSides: 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("make", "length", "world", "layout"),
    [
        *((make, 64, 4, "contiguous") for make in (Window, BothSides, Packed, Bias)),
        *((make, 61, 2, "contiguous") for make in (Window, Packed, Holes)),
        *((make, 61, 3, "zigzag") for make in (Window, Packed)),
    ],
)
def test_unrolled_equals_looped(pools, make, length, world, layout):
    args = (run_ring, make, length, world, layout)
    hops = HOPS.get(make, world - 1) if layout == "contiguous" else world - 1
    hops = min(hops, world - 1)
    unrolled = pools[world].run(*args, 8, timeout=140)
    looped = pools[world].run(*args, 0, timeout=140)
    for (found, errors, messages), (other, other_errors, none) in zip(
        unrolled, looped, strict=True
    ):
        check([*errors, *other_errors])
        assert messages == [hops, 2 * hops + 1]  # back home besides
        assert none == [0, 0]
        check(deviations(found, other))
