"""Experts of each token, and writes to parts, in programs for many lengths."""

import pytest

from tests.cpu.length_cases import check, run
from tests.cpu.routed_models import ROUTED

PER_LENGTH = {"TokensMeet"}  # the experts depend on all tokens
NAMES = (*ROUTED, "written")


@pytest.mark.parametrize("name", NAMES)
def test_one_program_serves_many_lengths(pools, name):
    args = (name, "plain", "aot_eager", True, (64, 32, 96))
    answers = pools[2].run(run, *args, timeout=90)
    check(answers, [0, 1, 2] if name in PER_LENGTH else [0, 0, 0])


def test_compiled_by_inductor(pools):
    args = ("Twice", "plain", "inductor", True, (67, 64, 33))
    check(pools[2].run(run_forced, args, timeout=170), [0, 0, 0])


# Others divide by the number of tokens, or write in place.
PADDED = ("Switch", "Unflattened", "Twice", "UsedExperts", "WeightedCounts")
REFUSED = ("Routed", "ScatterAdd", "Dense")


@pytest.mark.parametrize("name", PADDED + REFUSED)
def test_lengths_that_the_ranks_do_not_divide(pools, name):
    args = (name, "plain", "aot_eager", True, (67, 33, 65))
    answers = pools[2].run(run_forced, args, timeout=90)
    check(answers, [0, 0, 0] if name in PADDED else [0, 1, 2])


def run_forced(args) -> list[tuple]:
    """With one strategy: another one is another program."""
    return run(*args, strategy="ring")
