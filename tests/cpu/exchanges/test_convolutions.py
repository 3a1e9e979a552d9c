"""Models with convolutions over their tokens equal one process, in every layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.convolved_forms import FORMS, TWINS, Model


def step(compiled, model: Model, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and gradients."""
    model.zero_grad()
    logits = compiled(tokens)
    logits.square().mean().backward()
    found = {f"grad of {n}": p.grad.clone() for n, p in model.named_parameters()}
    return found | {"logits": logits.detach()}


def run(
    name: str, ranks: int, length: int, options: dict
) -> tuple[list[Deviation], Counter[str]]:
    """What differs from one process in float64; what operators a step calls."""
    torch._dynamo.reset()
    model = Model(name).double()
    tokens = torch.randint(23, (2, length), generator=torch.Generator().manual_seed(0))
    exact = step(model, model, tokens)
    given = {"mesh": sequence_mesh(ranks), "inner": "aot_eager"} | options
    compiled = torch.compile(model, backend="cp", options=given)
    found = deviations(step(compiled, model, tokens), exact)
    with torch.profiler.profile() as profile:
        compiled(tokens)
    return found, Counter(e.name for e in profile.events())


@pytest.mark.parametrize(("length", "ranks"), [(16, 1), (16, 2), (13, 3), (20, 4)])
@pytest.mark.parametrize("name", FORMS)
def test_forms(pools, name: str, length: int, ranks: int) -> None:
    if name == "grid" and length == 13:
        length = 24  # a grid has whole rows
    for found, calls in pools[ranks].run(run, name, ranks, length, {}, timeout=120):
        check(found)
        rows_are_cut = name == "grid" and length // 4 % ranks
        assert calls["cp::halo_exchange"] == (0 if rows_are_cut else 2)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "fold"])
@pytest.mark.parametrize("name", ["sliced_dilated", "padded"])
def test_layouts(pools, name: str, layout: str) -> None:
    """Convolutions see the tokens in order."""
    options = {"strategy": "ring", "layout": layout}
    for found, calls in pools[3].run(run, name, 3, 18, options, timeout=120):
        check(found)
        assert calls["cp::halo_exchange"] == 2


@pytest.mark.parametrize("name", ["sliced", "conformer"])
def test_with_inductor(pools, name: str) -> None:
    options = {"inner": "inductor"}
    for found, calls in pools[2].run(run, name, 2, 17, options, timeout=170):
        check(found)
        assert calls["cp::halo_exchange"] > 0


@pytest.mark.parametrize("name", TWINS)
def test_twins(pools, name: str) -> None:
    for found, calls in pools[2].run(run, name, 2, 16, {}, timeout=120):
        check(found)
        assert calls["cp::moved_tokens"] > 0
