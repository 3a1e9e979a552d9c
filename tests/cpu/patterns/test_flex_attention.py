"""flex_attention on several ranks equals torch's own in eager, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

import cpcompile as cp
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.attention_pattern_forms import Model
from tests.support.forms.flex_forms import (
    CALLS_OF_LAYER,
    FORMS,
    LENGTH,
    SCORE_MODS,
    gradients_on_cpu,
)

EVERY_DEFAULT: Mapping[str, str] = MappingProxyType({})


def run(
    name: str, ranks: int, inner: str, others: Mapping[str, str] = EVERY_DEFAULT
) -> tuple[list[Deviation], int]:
    """What differs; the number of calls that are shared out."""
    torch._dynamo.reset()
    mesh = sequence_mesh(ranks)
    model = Model((FORMS | SCORE_MODS)[name]).double()
    tokens = torch.randint(37, (2, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(call) -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits = call(tokens)
        logits.square().mean().backward()
        named = model.named_parameters()
        found = {f"grad of {n}": p.grad.clone() for n, p in named if p.grad is not None}
        return found | {"logits": logits.detach()}

    options = {"mesh": mesh, "inner": inner, "shard": {"tokens": 1}, **others}
    with gradients_on_cpu():
        exact = step(model)
        compiled = torch.compile(model, backend="cp", options=options)
        got = step(compiled)
        return deviations(got, exact), len(cp.explain(compiled, tokens).calls)


@pytest.mark.parametrize(
    ("ranks", "inner"),
    [(1, "aot_eager"), (2, "aot_eager"), (3, "aot_eager"), (2, "inductor")],
)
@pytest.mark.parametrize("name", [*FORMS, *SCORE_MODS])
def test_against_eager(pools, name: str, ranks: int, inner: str) -> None:
    for found, calls in pools[ranks].run(run, name, ranks, inner, timeout=170):
        check(found)
        assert calls == 2 * CALLS_OF_LAYER[name]


# What no other test runs in each operator: log-sum-exps, and functions of scores.
NAMES = ("with_sinks", "merged", "lse_alone", "squared", "waved", "weighted_keys")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("name", NAMES)
def test_operators_and_layouts(
    pools, name: str, strategy: str, layout: str, ranks: int
) -> None:
    given = {"strategy": strategy, "layout": layout}
    args = (run, name, ranks, "aot_eager", given)
    for found, calls in pools[ranks].run(*args, timeout=170):
        check(found)
        assert calls == 2 * CALLS_OF_LAYER[name]
