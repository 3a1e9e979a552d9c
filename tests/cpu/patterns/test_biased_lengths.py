"""Biases of positions, and what they are added to, in programs for many lengths."""

import pytest
import torch

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.patterns.test_attention_patterns import step
from tests.support.bounds import Deviation, check, deviations
from tests.support.forms.attention_pattern_forms import FORMS, Model

NAMES = ("alibi", "relative", "of_the_shape")


def run(name: str, lengths: tuple[int, ...], options: dict) -> list[tuple]:
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


def check_one_program(answers: list) -> None:
    for found in answers:
        assert {number for number, _ in found} == {0}, found
        for _, each in found:
            check(each)


@pytest.mark.parametrize("name", NAMES)
def test_lengths_that_the_ranks_divide(pools, name: str) -> None:
    options = {"inner": "aot_eager", "strategy": "ring", "layout": "zigzag"}
    arguments = (name, (34, 24, 66), options)
    check_one_program(pools[2].run(run, *arguments, timeout=120))


CHOICES = [
    {"inner": "aot_eager", "strategy": "ring", "layout": "contiguous"},
    {"inner": "inductor", "strategy": "ring", "layout": "zigzag"},
    {"inner": "aot_eager", "strategy": "all_gather", "layout": "zigzag"},
    {"inner": "inductor", "strategy": "ulysses"},
    {"inner": "aot_eager", "strategy": "hybrid"},
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", CHOICES, ids=lambda x: "-".join(str(value) for value in x.values())
)
def test_other_lengths(pools, name: str, options: dict) -> None:
    ranks = 4 if options["strategy"] == "hybrid" else 2
    arguments = (name, (35, 24, 66), options)
    check_one_program(pools[ranks].run(run, *arguments, timeout=170))
