"""Transformers of diffusers that join streams gather no tokens of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.testing import assert_close

from cpcompile.accounting.graph_account import (
    Exchange,
    GraphDirection,
    Kind,
    Purpose,
)
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on
from tests.models.families.automatic import PREFIX, automatic_case
from tests.models.setting import Setting
from tests.models.steps import make_model, run_steps
from tests.support.bounds import default_dtype

# sd3, flux and wan: gradients in test_compatibility.py, gathers in the pipelines' tests
MODELS = (
    "CogVideoXTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
)


def run(name: str) -> list[Exchange]:
    """Compare a step on one row with one process; return what is gathered."""
    torch._dynamo.reset()
    case = automatic_case(f"{PREFIX}diffusers/{name}")
    alone = case.doubled(make_model(case))
    model, given = copy.deepcopy(alone), Setting(batch=1)
    with default_dtype(torch.float64):
        wanted = run_steps(case, given, alone, alone, torch.float64)
        compiled = compiled_on(2, model)
        with recording() as reports:
            got = run_steps(case, given, model, compiled, torch.float64)
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        # Some embed times and positions in float32, whatever the parameters are.
        assert_close(got[key], x, rtol=0, atol=2e-6 * float(x.abs().max()) + 1e-12)
    assert any(x.plan is not None for report in reports for x in report.calls)
    accounts = [account for report in reports for account in report.accounts]
    exchanges = [x for account in accounts for x in account.exchanges]
    return [x for x in exchanges if x.kind is Kind.ALL_GATHER]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MODELS)
def test_streams_are_joined_without_gathers(pools, name):
    """The result is gathered, and where patches become tokens their gradient is."""
    for gathered in pools[2].run(run, name, timeout=230):
        others = [x for x in gathered if x.purpose is not Purpose.RESULT]
        assert len(others) <= 1, others
        for exchange in others:
            assert exchange.direction is GraphDirection.BACKWARD, exchange
            assert exchange.purpose in (Purpose.VALUE, Purpose.GRADIENT), exchange
