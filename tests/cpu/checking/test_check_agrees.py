"""What cp.check says of fake ranks is what a run on real ranks reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import cpcompile as cp
from cpcompile.accounting.graph_account import Exchange
from cpcompile.logs import warn_once
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.run_case import warnings_of
from tests.models.setting import Setting
from tests.models.steps import calls, make_model
from tests.models.zoo import CASES

RANKS = 2
SETTING = Setting(world=RANKS, annotated=False)
MODELS = (
    *("llama/default", "qwen3_5/default", "mamba2/default", "deepseek_v3/default"),
    *("bert/padded", "gemma3/default", "mixtral/default", "nn_encoder/default"),
    *("gpt2/default", "timm_vit/token"),
)


@dataclass(frozen=True)
class Reported:
    """Of one rank, as plain data."""

    attention: list[tuple[str, str | None]]  # path, strategy and layout
    mixers: list[tuple[str, str]]
    exchanged: Counter[tuple[str, ...]]  # bytes by direction, kind, purpose and place
    work: float
    warnings: int


def reported(explanation: Explanation, warnings: int) -> Reported:
    graphs = explanation.graphs
    exchanged: Counter[tuple[str, ...]] = Counter()
    for x in explanation.exchanges:
        exchanged[_place(x)] += x.bytes
    return Reported(
        attention=[(c.path, c.form) for graph in graphs for c in graph.calls],
        mixers=[(m.path, m.strategy.value) for graph in graphs for m in graph.mixers],
        exchanged=exchanged,
        work=explanation.work_ratio(),
        warnings=warnings,
    )


def _place(x: Exchange) -> tuple[str, ...]:
    words = (x.direction.value, x.kind.value, x.purpose.value)
    return (*words, x.what, str(x.line))


def on_rank(name: str) -> Reported:
    torch._dynamo.reset()
    warn_once.cache_clear()
    case = CASES[name]
    model = make_model(case)
    ((inputs, _),) = calls(case, SETTING)
    options: dict[str, Any] = {
        "mesh": sequence_mesh(RANKS),
        "inner": "aot_eager",
        "strict": False,
    }
    step = torch.compile(model, backend="cp", options=options)
    with (
        warnings_of() as warnings,
        recording() as graphs,
        case.around(),
        cp.config.patch(hardware="cpu"),
    ):
        step(**inputs)
    once = {id(graph): graph for graph in graphs}
    return reported(Explanation(tuple(once.values())), len(warnings))


@pytest.mark.parametrize("name", MODELS)
def test_check_is_what_a_run_reports(pools, name: str) -> None:
    case = CASES[name]
    ((inputs, _),) = calls(case, SETTING)
    with case.around():
        check = cp.check(make_model(case), ranks=RANKS, hardware="cpu", **inputs)
    real = pools[RANKS].run(on_rank, name, timeout=200)[0]
    fake = reported(check.explanation, len(check.warnings))
    assert (fake.attention, fake.mixers) == (real.attention, real.mixers)
    assert fake.exchanged == real.exchanged
    assert fake.work == pytest.approx(real.work, rel=0.01)
    assert fake.warnings == real.warnings
    assert check.refused is None
