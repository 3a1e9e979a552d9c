"""Images whose rows ranks share out equal one process, in float64, with buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from cpcompile.accounting.graph_account import Purpose
from cpcompile.reporting.graph_report import GraphReport
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.support.forms.normalised_forms import (
    NORMS,
    FlattenedBatch,
    Normalised,
    Patches,
    Rows,
)
from tests.support.grids import Stages


def compared(
    make: Callable[[], nn.Module],
    rows: int,
    world: int,
    training: bool = True,
    most_work: float | None = None,
    **options: object,
) -> GraphReport:
    """Two steps, which equal one process; most_work: of all ranks, to one process."""
    torch.manual_seed(0)
    model = make().double().train(training)
    calls = [(torch.randn(2, 3, rows, 16, dtype=torch.float64),) for _ in range(2)]
    for (x,) in calls:
        x.requires_grad_()
    found = compare_calls(model, calls, world, **options)
    found.check()
    report = found.reports[0]
    if most_work is not None:
        assert found.warnings == []
        assert report.account.work().ratio < most_work
    return report


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("world", "rows"), [(2, 16), (3, 24), (4, 32)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@on_ranks("world")
def test_norms(name, world, rows, training):
    compared(lambda: Normalised(name), rows, world, training, 1.6)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"shard": {"x": 2}}], ids=["inferred", "named"]
)
@on_ranks("world")
def test_a_stem_before_attention(options, world):
    report = compared(Rows, 40, world, most_work=1.3, **options)
    assert [(x.name, x.dim) for x in report.inputs] == [("x", 2)]


@pytest.mark.parametrize("world", [2, 4])
@on_ranks("world")
def test_windows_of_rows(world):
    """They are of the rank's rows, with a mask and a learned bias."""
    report = compared(Stages, 64, world)
    assert [x.in_windows for x in report.calls] == [True, True]


@on_ranks(2)
def test_tokens_flattened_with_their_batch():
    report = compared(FlattenedBatch, 16, 2)
    sent = [x for account in report.accounts for x in account.exchanges]
    assert any(x.purpose is Purpose.VALUE for x in sent)


@on_ranks(2)
def test_one_convolution_is_not_shared_by_rows():
    """Its result is cut, into as many tokens for each rank: three rows are uneven."""
    report = compared(Patches, 12, 2)
    assert not report.inputs
    assert report.began


@pytest.mark.parametrize("name", ["batch", "group", "instance, kept"])
@on_ranks(2)
def test_with_inductor(name):
    compared(lambda: Normalised(name), 16, 2, inner="inductor")
