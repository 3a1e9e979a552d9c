"""Every form of attention that torch's Inductor knows equals one process."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.patterns.test_attention_patterns import step
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.torch_forms import TABLE, Model


def run(number: int, ranks: int, length: int) -> list[Deviation]:
    torch._dynamo.reset()
    form = TABLE[number]
    model = Model(number).to(form.dtype or torch.float64)
    tokens = torch.arange(2 * length).reshape(2, length) % 36 + 1
    tokens[0, -3:] = 0  # padding
    options = {"mesh": sequence_mesh(ranks), "inner": "aot_eager"}
    compiled = torch.compile(model, backend="cp", options=options)
    got = step(compiled, model, tokens)
    exact, rough = copy.deepcopy(model).double(), None
    if form.dtype is not None:
        exact.number, exact.numbers = form.like, {"inv_scale": form.inv_scale}
        rough = step(model, model, tokens)
    return deviations(got, step(exact, exact, tokens), rough)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("number", TABLE, ids=str)
def test_they_equal_one_process(pools, number: int, ranks: int) -> None:
    for found in pools[ranks].run(run, number, ranks, 17, timeout=120):
        check(found)
