"""Models that write their attention out, in all forms and lengths: as one process."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.cpu.against_one_process import compare_calls
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations
from tests.support.forms.attention_pattern_forms import FORMS, TWINS, Model
from tests.support.forms.query_forms import (
    ASKING,
    WIDTH,
    Asking,
    Captions,
    RowsFlattened,
)
from tests.support.forms.torch_forms import TABLE, TorchForm
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


def run(name: str, ranks: int, length: int, options: dict) -> int:
    """Compare with one process in float64; return the number of calls."""
    tokens = torch.randint(37, (2, length), generator=torch.Generator().manual_seed(0))
    options, settings = split(options)
    with settings:
        model = Model((FORMS | TWINS)[name]).double()
        found = compare_calls(model, [(tokens,)], ranks, **options)
    found.check()
    return len(found.rewritten)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", FORMS)
@on_ranks("ranks")
def test_forms(name: str, ranks: int) -> None:
    assert run(name, ranks, 17, {}) == 2


@pytest.mark.parametrize("name", TWINS)
@on_ranks(2)
def test_twins(name: str) -> None:
    """They are exact too, and no attention over the sequence."""
    assert run(name, 2, 16, {"shard": {"tokens": 1}}) == 0


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
@on_ranks(4)
def test_every_strategy(name: str, options: dict) -> None:
    """Softcap, sinks and biases of positions are arguments of every operator."""
    assert run(name, 4, 18, options) == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("number", TABLE, ids=str)
@on_ranks("ranks")
def test_they_equal_one_process(number: int, ranks: int) -> None:
    form = TABLE[number]
    model = TorchForm(number).to(form.dtype or torch.float64)
    tokens = torch.arange(2 * 17).reshape(2, 17) % 36 + 1
    tokens[0, -3:] = 0  # padding
    compiled = compiled_on(ranks, model)
    got = step(compiled, model, tokens)
    exact, rough = copy.deepcopy(model).double(), None
    if form.dtype is not None:
        exact.number, exact.numbers = form.like, {"inv_scale": form.inv_scale}
        rough = step(model, model, tokens)
    check(deviations(got, step(exact, exact, tokens), rough))


SYMBOLIC = [
    {"inner": "aot_eager", "strategy": "ring", "layout": "contiguous"},
    {"inner": "inductor", "strategy": "ring", "layout": "zigzag"},
    {"inner": "aot_eager", "strategy": "all_gather", "layout": "zigzag"},
    {"inner": "inductor", "strategy": "ulysses"},
    {"inner": "aot_eager", "strategy": "hybrid"},
]


@pytest.mark.parametrize("name", ["alibi", "relative", "of_the_shape"])
@pytest.mark.parametrize(
    "options",
    SYMBOLIC,
    ids=lambda x: "-".join(str(value) for value in x.values()),
)
@on_ranks(lambda options: 4 if options["strategy"] == "hybrid" else 2)
def test_other_lengths(name: str, options: dict) -> None:
    """One program is for lengths that the ranks divide, and one for others."""
    calls = [(torch.arange(2 * n).reshape(2, n) % 37,) for n in (35, 24, 66)]
    options = options | {"shard": {"tokens": 1}, "dynamic": True}
    world = 4 if options["strategy"] == "hybrid" else 2
    found = compare_calls(Model(FORMS[name]).double(), calls, world, **options)
    found.check()
    assert [len(x.calls) for x in found.reports] == [2] * 3
    assert len(set(map(id, found.reports))) == 2


KINDS = (*ASKING, "captions", "rows")


def made(kind: str, tokens: int) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A model, and its inputs."""
    if kind == "captions":
        ids = torch.arange(2 * tokens).reshape(2, tokens) % 37
        return Captions(), (ids, torch.randn(2, 3, 16, 16, dtype=torch.float64))
    if kind == "rows":
        rows = 4 * (tokens // 4)
        return RowsFlattened(), (torch.randn(2, 3, rows, 16, dtype=torch.float64),)
    x = torch.randn(2, tokens, WIDTH, dtype=torch.float64)
    return Asking(ASKING[kind]), (x,)


@pytest.mark.parametrize(("world", "tokens"), [(2, 16), (3, 17), (4, 18), (2, 32)])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks("world")
def test_it_equals_one_process(kind, world, tokens):
    model, (*ids, x) = made(kind, tokens)
    found = compare_calls(model.double(), [(*ids, x.requires_grad_())], world)
    found.check()
    assert sum(found.rewritten) == (2 if kind == "captions" else 1)
