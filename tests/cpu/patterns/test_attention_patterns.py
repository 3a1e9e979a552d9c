"""Models that write their attention out, in all forms and lengths: as one process."""

from __future__ import annotations

import copy

import pytest
import torch

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import run as once
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.support.bounds import Deviation, check, deviations
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
    model = Model(FORMS[name]).double()
    compiled = compiled_on(2, model)
    found = []
    for length in (17, 24, 33):
        tokens = torch.arange(2 * length).reshape(2, length) % 37
        exact = step(model, model, tokens)
        found += deviations(step(compiled, model, tokens), exact)
    return found


def test_several_lengths(pools) -> None:
    for found in pools[2].run(run_lengths, "with_sinks", timeout=120):
        check(found)


def run_torch_form(number: int, ranks: int, length: int) -> list[Deviation]:
    torch._dynamo.reset()
    form = TABLE[number]
    model = TorchForm(number).to(form.dtype or torch.float64)
    tokens = torch.arange(2 * length).reshape(2, length) % 36 + 1
    tokens[0, -3:] = 0  # padding
    compiled = compiled_on(ranks, model)
    got = step(compiled, model, tokens)
    exact, rough = copy.deepcopy(model).double(), None
    if form.dtype is not None:
        exact.number, exact.numbers = form.like, {"inv_scale": form.inv_scale}
        rough = step(model, model, tokens)
    return deviations(got, step(exact, exact, tokens), rough)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("number", TABLE, ids=str)
def test_they_equal_one_process(pools, number: int, ranks: int) -> None:
    for found in pools[ranks].run(run_torch_form, number, ranks, 17, timeout=120):
        check(found)


NAMES = ("alibi", "relative", "of_the_shape")


def run_symbolic(name: str, lengths: tuple[int, ...], options: dict) -> list[tuple]:
    """For every length: the number of its program, and deviations."""
    torch._dynamo.reset()
    mesh = sequence_mesh(torch.distributed.get_world_size())
    given = {"mesh": mesh, "shard": {"tokens": 1}} | options
    model = Model(FORMS[name]).double()
    compiled = torch.compile(model, backend="cp", options=given, dynamic=True)
    programs: list = []
    found: list[tuple[int, list[Deviation]]] = []
    for length in lengths:
        tokens = torch.arange(2 * length).reshape(2, length) % 37
        exact = step(model, model, tokens)
        with recording() as reports:
            got = step(compiled, model, tokens)
        (report,) = reports
        assert len(report.calls) == 2
        if report not in programs:
            programs.append(report)
        found.append((programs.index(report), deviations(got, exact)))
    return found


def check_programs(answers: list, count: int = 1) -> None:
    for found in answers:
        assert {number for number, _ in found} == {*range(count)}, found
        for _, each in found:
            check(each)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_the_ranks_divide(pools, name: str) -> None:
    options = {"inner": "aot_eager", "strategy": "ring", "layout": "zigzag"}
    arguments = (name, (34, 24, 66), options)
    check_programs(pools[2].run(run_symbolic, *arguments, timeout=120))


SYMBOLIC = [
    {"inner": "aot_eager", "strategy": "ring", "layout": "contiguous"},
    {"inner": "inductor", "strategy": "ring", "layout": "zigzag"},
    {"inner": "aot_eager", "strategy": "all_gather", "layout": "zigzag"},
    {"inner": "inductor", "strategy": "ulysses"},
    {"inner": "aot_eager", "strategy": "hybrid"},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    SYMBOLIC,
    ids=lambda x: "-".join(str(value) for value in x.values()),
)
def test_other_lengths(pools, name: str, options: dict) -> None:
    ranks = 4 if options["strategy"] == "hybrid" else 2
    arguments = (name, (35, 24, 66), options)
    # One for lengths that the ranks divide, and one for others.
    check_programs(pools[ranks].run(run_symbolic, *arguments, timeout=170), 2)


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
    compiled = compiled_on(world, model)
    x = inputs[-1]

    def values(call, module):
        return once(lambda y: call(*inputs[:-1], y), x.clone().requires_grad_(), module)

    wanted, got = values(alone, alone), values(compiled, model)
    calls = cp.explain(compiled, *inputs[:-1], x.requires_grad_()).calls
    return deviations(got, wanted), sum(call.plan is not None for call in calls)


@pytest.mark.parametrize(("world", "tokens"), [(2, 16), (3, 17), (4, 18), (2, 32)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_one_process(pools, kind, world, tokens):
    for found, calls in pools[world].run(compared, kind, tokens, world, timeout=120):
        check(found)
        assert calls == (2 if kind == "captions" else 1)
