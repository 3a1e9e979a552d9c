"""A second start of a program finds in Inductor's cache what the first has compiled."""

from __future__ import annotations

import time

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.composition.training import batches, loss_of, new_gpt
from tests.support.bounds import Deviation, check, deviations, gradients

TOKENS = 64


def first_call(layout: str, **more: object) -> tuple[float, list[Deviation], int, int]:
    """Seconds of a first step, errors, hits and misses of the cache."""
    torch._dynamo.reset()
    counters.clear()
    tokens, labels = next(batches(TOKENS))
    alone, model = new_gpt(), new_gpt()
    exact = gradients(loss_of(alone(tokens), labels), alone)
    options = {"mesh": sequence_mesh(2), "strategy": "ring", "layout": layout, **more}
    compiled = torch.compile(model, backend="cp", options=options)
    start = time.perf_counter()
    got = gradients(loss_of(compiled(tokens), labels), model)
    seconds = time.perf_counter() - start
    found = counters["inductor"]
    hits, misses = (found[f"fxgraph_cache_{what}"] for what in ("hit", "miss"))
    return seconds, deviations(got, exact), hits, misses


def run() -> list[tuple[float, list[Deviation], int, int]]:
    with fresh_cache():
        return [
            first_call("zigzag"),
            first_call("zigzag"),
            first_call("contiguous"),
            first_call("zigzag", unroll=0),
        ]


@pytest.mark.slow
def test_only_the_same_program_is_found(pools) -> None:
    """Forward and backward; another layout or option is compiled anew."""
    results = pools[2].run(run, timeout=175)
    for cold, warm, *others in results:
        for _, errors, *_ in (cold, warm, *others):
            check(errors)
        assert cold[2:] == (0, 2)
        assert warm[2:] == (2, 0)
        assert all(each[2:] == (0, 2) for each in others)
        assert warm[0] < cold[0]


def run_on_another_machine() -> list[tuple[float, list[Deviation], int, int]]:
    with fresh_cache():
        cold = first_call("zigzag")
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None, "nothing was compiled"
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        return [cold, first_call("zigzag")]


@pytest.mark.slow
def test_what_was_saved_is_found_in_an_empty_cache(pools) -> None:
    """By torch.compiler.save_cache_artifacts, as for a machine that starts later."""
    for cold, warm in pools[2].run(run_on_another_machine, timeout=175):
        for _, errors, *_ in (cold, warm):
            check(errors)
        assert cold[2:] == (0, 2)
        assert warm[2:] == (2, 0)
