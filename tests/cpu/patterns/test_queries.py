"""Attention by hand whose queries or tokens are no input's equals one process."""

from __future__ import annotations

import copy

import pytest
import torch

import cpcompile as cp
from tests.cpu.against_one_process import run
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.query_forms import (
    ASKING,
    WIDTH,
    Asking,
    Captions,
    RowsFlattened,
)

KINDS = (*ASKING, "captions", "rows")


def made(kind: str, tokens: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model in float64, and its inputs."""
    torch.manual_seed(0)
    if kind == "captions":
        ids = torch.arange(2 * tokens).reshape(2, tokens) % 37
        image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        return Captions().double(), (ids, image)
    if kind == "rows":
        rows = 4 * (tokens // 4)
        return RowsFlattened().double(), (
            torch.randn(2, 3, rows, 16, dtype=torch.float64),
        )
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    return Asking(ASKING[kind]).double(), (x,)


def compared(kind: str, tokens: int, world: int) -> tuple[list[Deviation], int]:
    """What differs from one process; calls that are shared out."""
    torch._dynamo.reset()
    alone, inputs = made(kind, tokens)
    model = copy.deepcopy(alone)
    options = {"mesh": sequence_mesh(world), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    x = inputs[-1]

    def values(call, module):
        return run(lambda y: call(*inputs[:-1], y), x.clone().requires_grad_(), module)

    wanted, got = values(alone, alone), values(compiled, model)
    calls = cp.explain(compiled, *inputs[:-1], x.requires_grad_()).calls
    return deviations(got, wanted), sum(call.plan is not None for call in calls)


@pytest.mark.parametrize(("world", "tokens"), [(2, 16), (3, 17), (4, 18), (2, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_one_process(pools, kind, world, tokens):
    for found, calls in pools[world].run(compared, kind, tokens, world, timeout=120):
        check(found)
        assert calls == (2 if kind == "captions" else 1)
