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
    """Attention under one mask, which its name says, as models write it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(WIDTH, 3 * WIDTH), MASKS[name]
        self.bias = nn.Parameter(torch.randn(1, HEADS, LONGEST, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        row, key = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
        mask = self.mask(self, x, row, key)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + y.transpose(1, 2).flatten(2)


def packed(m: Attention, x: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Documents that the data say: which chunks are needed nobody knows before."""
    ids = (x[..., 0] > 0.5).cumsum(1)
    return (key <= row) & (ids[:, None, :, None] == ids[:, None, None])


def holes(m: Attention, x: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """Ids that come again, so that ranges of keys do not say it all."""
    ids = (x[..., 0] > 0.5).cumsum(1) % 3
    return (key <= row) & (ids[:, None, :, None] == ids[:, None, None])


def bias(m: Attention, x: Tensor, row: Tensor, key: Tensor) -> Tensor:
    """With a gradient; low numbers hide the first keys, and lose no scores."""
    low = m.bias[:, :, : x.shape[1], : x.shape[1]] - 2e3 * (key < 4)
    return low.masked_fill(key > row, -torch.inf)


MASKS = {
    "window": lambda m, x, row, key: (key <= row) & (key > row - WINDOW),
    "both sides": lambda m, x, row, key: (key - row).abs() < WINDOW,
    "packed": packed,
    "holes": holes,
    "bias": bias,
}
# Messages with keys in the forward, where each rank has at least a window.
HOPS = {"window": 1, "both sides": 2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mask", "length", "world", "layout"),
    [
        *((x, 64, 4, "contiguous") for x in ("window", "both sides", "packed", "bias")),
        *((x, 61, 2, "contiguous") for x in ("window", "packed", "holes")),
        *((x, 61, 3, "zigzag") for x in ("window", "packed")),
    ],
)
@on_ranks("world", timeout=280)
def test_unrolled_equals_looped(mask, length, world, layout):
    hops = HOPS.get(mask, world - 1) if layout == "contiguous" else world - 1
    hops = min(hops, world - 1)
    torch.manual_seed(0)
    model = Attention(mask).double()
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
