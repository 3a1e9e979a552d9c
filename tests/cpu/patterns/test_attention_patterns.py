"""Models that write their attention out equal one process, and share it out."""

from __future__ import annotations

import pytest
import torch

import cpcompile as cp
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.attention_pattern_forms import FORMS, TWINS, Model
from tests.support.settings import split


def step(compiled, model: Model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    logits = compiled(tokens)
    logits.square().mean().backward()
    named = model.named_parameters()
    found = {f"grad of {n}": p.grad.clone() for n, p in named if p.grad is not None}
    return found | {"logits": logits.detach()}


def run(
    name: str, ranks: int, length: int, options: dict
) -> tuple[list[Deviation], int]:
    """What differs from one process in float64; number of calls."""
    torch._dynamo.reset()
    mesh = sequence_mesh(ranks)
    model = Model((FORMS | TWINS)[name]).double()
    tokens = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(0))
    exact = step(model, model, tokens)
    given, settings = split({"mesh": mesh, "inner": "aot_eager"} | options)
    compiled = torch.compile(model, backend="cp", options=given)
    with settings:
        got = step(compiled, model, tokens)
        report = cp.explain(compiled, tokens)
    return deviations(got, exact), len(report.calls)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FORMS)
def test_forms(pools, name: str, ranks: int) -> None:
    for found, calls in pools[ranks].run(run, name, ranks, 17, {}, timeout=120):
        check(found)
        assert calls == 2


@pytest.mark.parametrize("name", TWINS)
def test_twins(pools, name: str) -> None:
    """They are exact too, and no attention over the sequence."""
    options = {"shard": {"tokens": 1}}
    for found, calls in pools[2].run(run, name, 2, 16, options, timeout=120):
        check(found)
        assert calls == 0


CHOICES = [
    {"strategy": "ring", "layout": "contiguous"},
    {"strategy": "ring", "layout": "zigzag"},
    {"strategy": "all_gather", "layout": "contiguous"},
    {"strategy": "all_gather", "layout": "zigzag"},
    {"strategy": "ulysses"},
    {"strategy": "hybrid"},
    {"strategy": "ring", "unroll": 0},
    {"inner": "inductor", "strategy": "ring"},
    {"inner": "inductor", "strategy": "ulysses"},
]
CHANGED = [
    *("softcapped", "softcapped_everywhere", "with_sinks", "with_sinks_everywhere"),
    *("alibi", "relative", "sinks_and_low_bias", "lost", "lost_and_filled"),
]


@pytest.mark.parametrize(
    "options", CHOICES, ids=lambda x: "-".join(str(value) for value in x.values())
)
@pytest.mark.parametrize("name", CHANGED)
def test_every_strategy(pools, name: str, options: dict) -> None:
    """Softcap, sinks and biases of positions are arguments of every operator."""
    for found, calls in pools[4].run(run, name, 4, 18, options, timeout=170):
        check(found)
        assert calls == 2


def run_lengths(name: str) -> list[Deviation]:
    """What differs, with one compiled model for all lengths."""
    torch._dynamo.reset()
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    model = Model(FORMS[name]).double()
    compiled = torch.compile(model, backend="cp", options=options)
    found = []
    for length in (17, 24, 33):
        tokens = torch.arange(2 * length).reshape(2, length) % 37
        exact = step(model, model, tokens)
        found += deviations(step(compiled, model, tokens), exact)
    return found


def test_several_lengths(pools) -> None:
    for found in pools[2].run(run_lengths, "with_sinks", timeout=120):
        check(found)
