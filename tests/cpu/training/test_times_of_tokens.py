"""Times of tokens, of which weights make scales, against one process in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cpcompile.accounting.graph_account import Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.golden.operands import attend
from tests.support.bounds import check, deviations


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


def steps(call, model, lengths) -> dict[str, torch.Tensor]:
    """Results of some lengths, and the sums of their gradients."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    results = {}
    for length in lengths:
        x = torch.randn(2, length, 8, generator=generator, dtype=torch.float64)
        t = torch.randint(9, (2, length), generator=generator)
        y = call(x, t)
        (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
        results[f"result {length}"] = y.detach()
    return results | {n: p.grad.clone() for n, p in model.named_parameters()}


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
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Times(is_flat).double()
    wanted = steps(model, model, lengths)
    compiled = compiled_on(ranks, model, shard={"x": 1}, layout=layout)
    with recording() as reports:
        got = steps(compiled, model, lengths)
    accounts = [account for report in reports for account in report.accounts]
    exchanges = [x for account in accounts for x in account.exchanges]
    gathered = [x for x in exchanges if x.kind is Kind.ALL_GATHER]
    of_times = [x for x in gathered if x.line.function == "forward"]
    found = deviations(got, wanted)
    gathered = [x for x in of_times if x.purpose is Purpose.VALUE]
    check(found)
    assert gathered == []
