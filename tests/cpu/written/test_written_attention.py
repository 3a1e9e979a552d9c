"""Models that write their attention out equal one process, and share it out."""

from __future__ import annotations

import pytest
import torch

import cpcompile as cp
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.written_forms import FORMS, TWINS, Model


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
    given = {"mesh": mesh, "inner": "aot_eager"} | options
    compiled = torch.compile(model, backend="cp", options=given)
    got = step(compiled, model, tokens)
    report = cp.explain(compiled, tokens)
    return deviations(got, exact), len(report.calls)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FORMS)
def test_forms(pools, name: str, ranks: int) -> None:
    for found, calls in pools[ranks].run(run, name, ranks, 17, {}, timeout=120):
        check(found)
        assert calls == 2
