"""Times of tokens, of which weights make scales, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile.accounting.graph_account import Kind, Purpose
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.golden.operands import attend


class Times(nn.Module):
    """Tokens x [B, S, C] that are scaled by what their times t [B, S] say."""

    def __init__(self, is_flat):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.is_flat = is_flat

    def forward(self, x, t):
        t = t.flatten() if self.is_flat else t
        angles = t[..., None].float() * torch.arange(3.0)
        table = torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)
        scale = self.second(F.silu(self.first(table)))
        return attend(x * scale.view(x.shape[0], -1, 8))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "as tokens"])
@pytest.mark.parametrize(
    ("lengths", "layout"),
    [
        ((29,), "contiguous"),
        ((24,), "zigzag"),
        ((24, 30, 36), "contiguous"),
    ],
    ids=["uneven", "zigzag", "several"],
)
@on_ranks("ranks")
def test_no_times_are_gathered(lengths, layout, is_flat, ranks):
    calls = [
        (torch.randn(2, n, 8, dtype=torch.float64), torch.randint(9, (2, n)))
        for n in lengths
    ]
    options = {"shard": {"x": 1}, "layout": layout}
    found = compare_calls(Times(is_flat).double(), calls, ranks, **options)
    found.check()
    values = (Kind.ALL_GATHER, Purpose.VALUE, "forward")
    gathered = [(x.kind, x.purpose, x.line.function) for x in found.exchanges]
    assert values not in gathered
