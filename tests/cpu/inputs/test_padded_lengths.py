"""Lengths that the ranks do not divide have the program of those that they do."""

import logging

import pytest
import torch

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.inputs.test_symbolic_lengths import check_balanced, run_balanced
from tests.cpu.length_cases import check, run
from tests.support.bounds import Values
from tests.support.forms.repeated_models import Kind, new_model, two_steps

LENGTHS = (67, 64, 33, 90, 65)

# Three ranks divide 33 and 90, two 64 and 90.
MODELS = [
    ("small_gpt", "aot_eager", 2),
    ("small_gpt", "inductor", 3),
    ("attention", "aot_eager", 3),
    ("attention", "inductor", 2),
    ("normed", "aot_eager", 2),
    ("normed", "inductor", 3),
    ("window", "inductor", 2),
    ("padded", "aot_eager", 3),
    ("padded", "inductor", 2),
    ("masked", "aot_eager", 2),
    ("documents", "aot_eager", 3),
    ("cross", "aot_eager", 2),
    ("capped", "aot_eager", 2),
    ("capped", "inductor", 3),
    ("encoder", "aot_eager", 2),
    ("encoder", "inductor", 3),
    ("dropping", "aot_eager", 2),
    ("dropping", "inductor", 3),
    ("one_token", "aot_eager", 2),
    ("pooled", "aot_eager", 3),
    ("written", "aot_eager", 2),
    ("shifted", "aot_eager", 3),
    ("convolved", "aot_eager", 3),
    ("convolved", "inductor", 2),
    ("ModuleEncoder", "aot_eager", 3),
]


@pytest.mark.parametrize(("name", "inner", "ranks"), MODELS)
def test_one_program_serves_them(pools, name, inner, ranks):
    args = (name, "plain", inner, True, LENGTHS)
    answers = pools[ranks].run(run_forced, args, timeout=170)
    check(answers, [0] * len(LENGTHS))


def run_reported(name) -> list[str]:
    with recording() as reports:
        run(name, "plain", "aot_eager", True, (33, 32), strategy="ring")
    return [" ".join(x.edges()) for x in reports]


def test_the_report_says_so(pools):
    for first, second in pools[2].run(run_reported, "attention", timeout=90):
        assert "any length: padded inside to a multiple of 2" in first
        assert first == second


def run_forced(args) -> list[tuple]:
    """With one strategy: another one is another program."""
    return run(*args, strategy="ring")


def test_a_balanced_layout(pools):
    args = ("small_gpt", "plain", "aot_eager", True, LENGTHS)
    options = {"layout": "zigzag", "strategy": "ring"}
    answers = pools[2].run(run_balanced, args, options, timeout=170)
    check_balanced(answers, "zigzag", [0] * len(LENGTHS))


def test_the_second_length_makes_it_symbolic(pools):
    args = ("small_gpt", "plain", "aot_eager", None, (67, 66, 41, 96))
    answers = pools[3].run(run, *args, timeout=90)
    for found in answers:
        assert len({number for number, _, _ in found}) == 3, found
    check(answers, [0, 1, 2, 1])


REFUSED = {
    "half": "has another number of tokens",
    "NoRule": "cummax lets the tokens meet",
    "InPlace": "scatter_ lets the tokens meet",
}


def run_logged(name) -> tuple[list[tuple], str]:
    """Also what is said of it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cpcompile")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        found = run(name, "plain", "aot_eager", True, (67, 33, 67))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return found, "\n".join(lines)


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_read_the_padding_is_compiled_per_length(pools, name):
    answers = pools[2].run(run_logged, name, timeout=90)
    check([found for found, _ in answers], [0, 1, 0])
    for _, text in answers:
        assert "forward serves the sizes of one call only: it cannot be padded" in text
        assert REFUSED[name] in text


def run_dropout(dynamic: bool) -> Values:
    torch._dynamo.reset()
    model = new_model(Kind(attention_dropout=0.3), layers=1)
    options = {"mesh": sequence_mesh(2), "strategy": "ring", "inner": "aot_eager"}
    step = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    with recording() as reports:
        values = two_steps(step, model)
    assert reports[0].calls[0].plan is not None
    return values


def test_dropout_of_attention_is_that_of_one_length(pools):
    symbolic, fixed = (pools[2].run(run_dropout, x, timeout=90) for x in (True, False))
    for one, other in zip(symbolic, fixed, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
