"""Images whose rows ranks share out equal one process, in float64, with buffers."""

from __future__ import annotations

import copy

import pytest
import torch

import cpcompile as cp
from cpcompile.accounting.graph_account import Purpose
from tests.cpu.against_one_process import run, warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.normalised_forms import (
    NORMS,
    WIDTH,
    FlattenedBatch,
    Normalised,
    Patches,
    Rows,
)
from tests.support.grids import Stages


def compared(
    make, rows: int, world: int, training: bool, options: dict
) -> tuple[list[Deviation], list[str], cp.Explanation]:
    """Two steps; what differs, our warnings, and what was done."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make().double().train(training)
    alone = copy.deepcopy(model)
    given = {"mesh": sequence_mesh(world), "inner": "aot_eager"} | options
    compiled = torch.compile(model, backend="cp", options=given)
    values = []
    with warnings() as texts:
        for call, module in ((alone, alone), (compiled, model)):
            found = {}
            for step in range(2):
                torch.manual_seed(step)
                x = torch.randn(2, 3, rows, 16, dtype=torch.float64)
                results = run(call, x.requires_grad_(), module)
                found |= {f"{name} of {step}": y for name, y in results.items()}
            values.append(
                found | {n: b.double().clone() for n, b in module.named_buffers()}
            )
    explained = cp.explain(compiled, x.detach().requires_grad_())
    return deviations(values[1], values[0]), texts, explained


def normalised(name: str, *args):
    return compared(lambda: Normalised(name), *args)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("world", "rows"), [(2, 16), (3, 22), (4, 28)])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_norms(pools, name, world, rows, training):
    args = (name, rows, world, training, {})
    for found, texts, explained in pools[world].run(normalised, *args):
        check(found)
        assert texts == []
        assert explained.work_ratio() < 1.3


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"shard": {"x": 2}}], ids=["inferred", "named"]
)
def test_a_stem_before_attention(pools, options, world):
    args = (Rows, 40, world, True, options)
    for found, texts, explained in pools[world].run(compared, *args):
        check(found)
        assert texts == []
        assert explained.work_ratio() < 1.3
        (graph,) = explained.graphs
        assert [(x.name, x.dim) for x in graph.inputs] == [("x", 2)]


@pytest.mark.parametrize("world", [2, 4])
def test_windows_of_rows(pools, world):
    """They are of the rank's rows, with a mask and a learned bias: no message."""
    for found, texts, explained in pools[world].run(
        compared, Stages, 64, world, True, {}
    ):
        check(found)
        assert texts == []
        assert explained.work_ratio() < 1.1
        (graph,) = explained.graphs
        assert [x.in_windows for x in graph.calls] == [True, True]


def test_tokens_flattened_with_their_batch(pools):
    for found, texts, explained in pools[2].run(
        compared, FlattenedBatch, 16, 2, True, {}
    ):
        check(found)
        assert texts == []
        accounts = explained.graphs[0].accounts
        sent = [x for account in accounts for x in account.exchanges]
        values = [x.bytes for x in sent if x.purpose is Purpose.VALUE]
        assert 0 < max(values) <= WIDTH * 16  # two float64 for each channel


def test_one_convolution_is_not_shared_by_rows(pools):
    """Its result is cut, into as many tokens for each rank: three rows are uneven."""
    for found, _, explained in pools[2].run(compared, Patches, 12, 2, True, {}):
        check(found)
        (graph,) = explained.graphs
        assert not graph.inputs
        assert graph.began


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", ["batch", "group", "instance, kept"])
def test_with_inductor(pools, name):
    args = (name, 16, 2, True, {"inner": "inductor"})
    for found, *_ in pools[2].run(normalised, *args, timeout=160):
        check(found)
