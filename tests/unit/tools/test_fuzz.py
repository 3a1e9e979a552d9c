"""The fuzzer's programs: alike for a seed, valid on one process, made smaller."""

import ast
import math
from dataclasses import replace

import pytest
import torch

from tests.fuzz.compare import beyond, distances
from tests.fuzz.draw import Wishes, draw
from tests.fuzz.judge import Outcome, Verdict, short
from tests.fuzz.kinds import KINDS
from tests.fuzz.minimise import leave_out, minimise
from tests.fuzz.on_rank import load, make_model, reference
from tests.fuzz.program import Program, Setting, Statement
from tests.fuzz.render import render
from tests.fuzz.report import Tally
from tests.support.bounds import TIMES

SEEDS = range(300)


def test_seeds_and_wishes():
    texts = [render(draw(seed)) for seed in SEEDS]
    assert texts == [render(draw(seed)) for seed in SEEDS]
    assert len(set(texts)) == len(texts)
    for text in texts:
        ast.parse(text)
    settings = [draw(seed, Wishes((3,), 0.25, "float32")).setting for seed in SEEDS]
    assert {s.world for s in settings} == {3}
    assert {s.dtype for s in settings} == {"float32"}
    share = sum(s.inner == "inductor" for s in settings) / len(settings)
    assert 0.15 < share < 0.35


def test_every_kind_and_every_choice_is_drawn():
    seen = {
        (s.kind, choice, value)
        for seed in range(8000)
        for s in draw(seed).walk()
        for choice, value in s.choices
    }
    choices = {
        (kind, choice, value)
        for kind, of in KINDS.items()
        for choice, values in of.choices.items()
        for value in values
    }
    assert choices - seen == set()


@pytest.mark.parametrize("seed", range(0, 300, 15))
def test_programs_run_on_one_process(seed):
    program = draw(seed)
    module = load(render(program))
    module.DRAWN = False  # the same in eager, and without compilation
    exact, moved = reference(module, make_model(module))
    assert exact.keys() == moved.keys()
    assert any(name.startswith("result") for name in exact)


def chained() -> Program:
    """A program of ten statements, one of which is a `sort` in a chain of views."""
    setting = Setting(lengths=(24,), strategy="ring", door="dtensor")
    source = Statement("source", "0", choices=(("how", "tokens"),), numbers=(0,))
    steps = tuple(
        Statement(kind, f"5.{place}", numbers=(place, 1, 2))
        for place, kind in enumerate(["sin", "sort", "roll"])
    )
    plain = {
        kind: tuple((c, values[-1]) for c, values in KINDS[kind].choices.items())
        for kind in ("elementwise", "norm", "views", "loss")
    }
    statements = tuple(
        Statement(
            "views" if place == 5 else "elementwise" if place % 2 else "norm",
            str(place),
            (str(place - 1),),
            plain["views" if place == 5 else "elementwise" if place % 2 else "norm"],
            (0, 1, 2),
            steps if place == 5 else (),
        )
        for place in range(1, 11)
    )
    losses = tuple(
        Statement("loss", f"l{place}", (str(place),), plain["loss"], (0,))
        for place in (3, 10)
    )
    return Program(1, setting, (source,), statements, losses, ("7",))


def test_a_failing_program_becomes_small():
    tried = []

    def fails(program: Program) -> bool:
        text = render(program)
        ast.parse(text)  # whatever is left out, the rest is a program
        tried.append(text)
        return ".sort(" in text

    small = minimise(chained(), fails, seconds=60.0)
    assert [s.kind for s in small.statements] == ["views"]
    assert [s.kind for s in small.statements[0].body] == ["sort"]
    assert len(small.losses) == 1
    assert not small.returned
    assert small.setting == replace(Setting(), lengths=small.setting.lengths)
    assert dict(small.losses[0].choices) == {"how": "square"}
    assert len(tried) < 80


def test_a_body_can_take_the_place_of_its_region():
    inside = Statement("norm", "2", ("-1",), (("how", "F.layer_norm"),), (0,))
    region = Statement("region", "1", ("0",), (("how", "checkpoint"),), (0,), (inside,))
    loss = Statement("loss", "3", ("1",), (("how", "square"),), (0,))
    program = replace(chained(), statements=(region,), returned=(), losses=(loss,))
    assert "checkpoint(part" in render(program)
    small = minimise(program, lambda p: "layer_norm" in render(p), seconds=60.0)
    assert [s.kind for s in small.statements] == ["norm"]
    assert small.statements[0].operands == ("0",)
    assert small.losses[0].operands == ("2",)
    # A value that is left out is its operand.
    program = leave_out(chained(), {"2", "3", "4"})
    assert program.statements[1].operands == program.losses[0].operands == ("1",)


def test_errors_and_bounds():
    exact = {"result": torch.tensor([1.0, 1e3]), "grad a": torch.ones(2) * 1e-20}
    exact["grad b"] = torch.ones(3)
    got = {k: v.clone() for k, v in exact.items()}
    got["result"][0] += 1e-3
    got["grad a"] += 1e-16  # noise: of a gradient that is zero
    errors = distances({k: v.double() for k, v in got.items()}, exact)
    assert errors["result"] == pytest.approx(1e-6, rel=1e-2)
    assert errors["grad a"] == pytest.approx(1e-12, rel=1e-2)
    assert beyond(errors, {}, "float64")[0].startswith("result")
    errors["result"] = 1.1e-6  # a fault, however far one process moves
    assert beyond(errors, {"result": 1e-5}, "float64") == [
        "result: error 1.1e-06, allowed 1e-06"
    ]
    eps = torch.finfo(torch.float32).eps
    for rough in (0.0, 1e-6):
        bound = TIMES * (rough + eps)
        assert not beyond({"loss": 0.99 * bound}, {"loss": rough}, "float32")
        assert beyond({"loss": 1.01 * bound}, {"loss": rough}, "float32")
    for nothing in (math.inf, math.nan):
        for error in (math.inf, math.nan, 5 * eps):
            assert beyond({"loss": error}, {"loss": nothing}, "float32")


ONE, ZERO = {"grad a": torch.ones(2)}, {"grad a": torch.zeros(2)}
NAN = {"grad a": torch.tensor([1.0, torch.nan])}


@pytest.mark.parametrize(
    ("got", "exact", "is_wrong"),
    [
        ({}, ONE, True),
        ({}, ZERO, False),
        (ZERO, {}, False),
        ({}, {"result": torch.zeros(2)}, True),
        (NAN, ONE, True),
        (NAN, NAN, False),
        ({"grad a": torch.ones(3)}, ONE, True),
    ],
)
def test_what_is_missing_is_wrong(got, exact, is_wrong):
    texts = beyond(distances(got, exact), {}, "float64")
    assert bool(texts) == is_wrong
    if not got and exact is ONE:
        assert texts == ["grad a: error inf, allowed 7.11e-11"]


def test_a_tally_counts_faults_and_keeps_seeds():
    tally, program = Tally(), chained()
    assert not tally.add(program, Outcome(Verdict.EQUAL, error=1e-15, calls=(2, 1)))
    assert tally.add(program, Outcome(Verdict.REFUSED, "why"))
    assert tally.faults == 0
    assert tally.add(program, Outcome(Verdict.HANG, "no answer"))
    assert not tally.add(program, Outcome(Verdict.HANG, "no answer"))
    assert tally.faults == 2
    table = tally.table()
    assert "hang        2  no answer  (seeds 1, 1)" in table
    assert "1 of 2 attention calls" in table
    # Reasons of one cause are alike.
    first = short('linear at m22 (File "x.py", line 43, in forward) got [2, 16, 9]')
    second = short('linear at m7 (File "x.py", line 1, in forward) got [3, 12, 9]')
    assert first == second and short("one") != short("another")
