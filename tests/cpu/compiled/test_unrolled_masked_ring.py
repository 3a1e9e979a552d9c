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

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import run
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations
from tests.support.counted_shifts import counted_shifts

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
@on_ranks("world", timeout=280)
def test_unrolled_equals_looped(make, length, world, layout):
    hops = HOPS.get(make, world - 1) if layout == "contiguous" else world - 1
    hops = min(hops, world - 1)
    torch.manual_seed(0)
    model = make().double()
    x = torch.randn(2, length, WIDTH, dtype=torch.float64).requires_grad_()
    wanted = run(model, x, model)
    options = {"mesh": sequence_mesh(world), "strategy": "ring", "layout": layout}
    results = []
    # And back home besides.
    for unroll, messages in ((8, [hops, 2 * hops + 1]), (0, [0, 0])):
        torch._dynamo.reset()
        call = torch.compile(model, backend="cp", options=options, fullgraph=True)
        with counted_shifts(unroll) as found:
            results.append(run(call, x, model))
        assert found == messages
        check(deviations(results[-1], wanted))
    check(deviations(*results))
