"""Times of tokens, of which weights make scales, against one process in float64."""

from __future__ import annotations

import pytest
import torch

from cpcompile.accounting.graph_account import Exchange, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.golden.sharding.test_times_of_tokens import Times
from tests.support.bounds import Deviation, check, deviations


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


def run(is_flat, lengths, ranks, layout) -> tuple[list[Deviation], list[Exchange]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Times(is_flat).double()
    wanted = steps(model, model, lengths)
    options = {"mesh": sequence_mesh(ranks), "inner": "aot_eager", "shard": {"x": 1}}
    compiled = torch.compile(model, backend="cp", options=options | {"layout": layout})
    with recording() as reports:
        got = steps(compiled, model, lengths)
    accounts = [account for report in reports for account in report.accounts]
    exchanges = [x for account in accounts for x in account.exchanges]
    gathered = [x for x in exchanges if x.kind is Kind.ALL_GATHER]
    of_times = [x for x in gathered if x.line.function == "forward"]
    return deviations(got, wanted), [x for x in of_times if x.purpose is Purpose.VALUE]


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
def test_no_times_are_gathered(pools, lengths, layout, is_flat, ranks):
    for found, gathered in pools[ranks].run(run, is_flat, lengths, ranks, layout):
        check(found)
        assert gathered == []
