"""When values are compared and calls announced, and what is said of differences."""

import pytest
import torch

from cpcompile.frontend.rank_consistency.rank_check import (
    RANDOM,
    Value,
    differences,
    is_due,
    is_quick,
    numbers,
)


@pytest.mark.parametrize(
    ("rule", "calls"),
    [
        (None, [*range(1, 11), 100, 200, 300]),
        ("first", [1]),
        (1, list(range(1, 301))),
        (50, [1, 50, 100, 150, 200, 250, 300]),
    ],
)
def test_when_values_are_compared(rule, calls):
    assert [call for call in range(1, 301) if is_due(rule, call)] == calls


@pytest.mark.parametrize(("between", "quick"), [(0.05, False), (0.03, True)])
def test_calls_are_quick_if_meetings_take_a_share_of_them(between, quick):
    compiling = [(0.0, 50.0), (50.0, 100.0)]  # the first meetings wait for compilers
    starts = [100.0 + between * call for call in range(8)]
    assert is_quick([*compiling, *((x, x + 1e-4) for x in starts)]) == quick


VALUES = [RANDOM, Value("input x", "pass the whole"), Value("buffer b", "load")]


def test_what_differs_is_named_with_the_first_rank_of_each_value():
    assert differences(VALUES, [[1, 2, 3]] * 3) == ""
    text = differences(VALUES, [[1, 2, 3], [1, 2, 5], [1, 2, 3]])
    assert text.startswith("buffer b: rank 0 has ") and "rank 1 has " in text
    assert "rank 2" not in text
    assert text.endswith("; needed the same on every rank: load")
    text = differences(VALUES, [[1, 2], [0, 3]])  # of a call without the last value
    assert "every rank: seed alike (torch.manual_seed) before the first call" in text
    assert text.endswith("; pass the whole")


def test_of_many_differences_three_are_named():
    values = [Value(f"input {i}", "pass it") for i in range(9)]
    what, _ = differences(values, [[0] * 9, [1] * 9]).split("; needed")
    names = [text.split(":")[0] for text in what.split("; ")]
    assert names == ["input 0", "input 1", "input 2", "and 6 more"]


def test_digests_keep_their_order_and_all_their_bits():
    large = 2**63 - 1
    digests = [torch.tensor(x) for x in (large, 5, -large, 6)]
    assert numbers(digests) == [large, 5, -large, 6]
