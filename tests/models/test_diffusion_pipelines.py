"""The script of docs/howto/diffusion.md, on two ranks against one process.

Weights, noise and times are float64. The models work out times, positions and norms in
float32, and the samplers latents, so that an error of that dtype is allowed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from cpcompile.accounting.graph_account import Exchange, Kind, Purpose
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.torchvision_schemas import define_schemas

SCRIPT = Path(__file__).parents[2] / "docs/howto/diffusion.py"

# Work of both ranks over that of one process, forward and backward. 23 of 45 tokens are
# 1.02; what is made of one time for all tokens is done by both ranks.
MOST_WORK = {
    "wan": 1.03,
    "wan_ti2v": 1.04,
    "hunyuan": 1.02,
    "ltx2": 1.05,
    "flux": 1.02,
    "sd3": 1.02,
}

Numbers = list[float]
Run = tuple[Numbers, Numbers, list[Exchange], float]


def script() -> ModuleType:
    define_schemas()  # before diffusers imports torchvision
    spec = importlib.util.spec_from_file_location("diffusion", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["diffusion"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def run(family: str, trains: bool) -> Run:
    """Return the numbers of ranks and of one process, gathers, the most work."""
    torch._dynamo.reset()
    howto = script()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    with recording() as reports:
        got = numbers(howto, family, trains, options)
    wanted = numbers(howto, family, trains, None)
    accounts = [account for report in reports for account in report.accounts]
    gathered = [
        x
        for account in accounts
        for x in account.exchanges
        if x.kind is Kind.ALL_GATHER and x.purpose is not Purpose.RESULT
    ]
    assert all(call.plan for report in reports for call in report.calls)
    return got, wanted, gathered, max(x.work.ratio for x in accounts)


def numbers(howto, family, trains, options) -> Numbers:
    task = howto.new_task(family, "cpu", torch.float64)
    transformer = task.pipe.transformer
    if options is not None:
        transformer.compile(backend="cp", options=options)
    if trains:
        return [*howto.train_step(transformer, task)]
    return [*howto.sample(task, steps=2)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("trains", [True, False], ids=["trained", "sampled"])
@pytest.mark.parametrize("family", MOST_WORK)
def test_a_pipeline(pools, family, trains):
    for got, wanted, gathered, work in pools[2].run(run, family, trains, timeout=390):
        assert got == pytest.approx(wanted, rel=1e-5)
        # Where patches become tokens, their gradients are gathered.
        assert len(gathered) <= 1, gathered
        assert all(x.purpose is Purpose.VALUE for x in gathered), gathered
        assert all(x.direction.value == "backward" for x in gathered), gathered
        assert work < MOST_WORK[family]
