"""When values are compared and calls announced, and what is said of differences."""

import pytest
import torch

from cpcompile.frontend.rank_consistency.compared_values import (
    RANDOM,
    Value,
    differences,
    fixes,
    numbers,
)
from cpcompile.frontend.rank_consistency.rank_check import is_due
from cpcompile.ranks import call_rate
from cpcompile.ranks.call_rate import CallRate


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


def quick(monkeypatch, meeting, between):
    """Whether calls so many seconds apart are quick, with meetings of such length."""
    clock = [100.0]
    monkeypatch.setattr(call_rate.time, "perf_counter", lambda: clock[0])
    found = CallRate()
    for call in range(9):
        start = clock[0]
        clock[0] += 50.0 if call < 2 else meeting  # the first ones wait for compilers
        found.add(start, clock[0])
        clock[0] += between - meeting
    return found.seems_quick()


def test_calls_are_quick_if_meetings_take_a_share_of_them(monkeypatch):
    assert not quick(monkeypatch, meeting=1e-4, between=0.05)
    assert quick(monkeypatch, meeting=1e-4, between=0.03)


VALUES = [Value(0, "input x", "pass the whole"), Value(1, "buffer b", "load", True)]


def test_what_differs_is_named_with_the_first_rank_of_each_value():
    names = ["input x", "buffer b", RANDOM]
    assert differences(names, [[1, 2, 3]] * 3) == []
    (text,) = differences(names, [[1, 2, 3], [1, 5, 3], [1, 2, 3]])
    assert text.startswith("buffer b: rank 0 has ") and "rank 1 has " in text
    assert "rank 2" not in text
    assert fixes(VALUES, [text]) == "load"
    texts = differences(names, [[1, 2, 3], [0, 2, 4]])
    assert fixes(VALUES, texts).startswith("pass the whole; seed alike")
    names = [f"input {i}" for i in range(9)]  # of many differences three are named
    texts = differences(names, [[0] * 9, [1] * 9])
    assert [t.split(":")[0] for t in texts] == [*names[:3], "and 6 more"]


def test_digests_keep_their_order_and_all_their_bits():
    large = 2**63 - 1
    found = numbers([torch.tensor(large), 5, torch.tensor(-large), 6])
    assert found == [large, 5, -large, 6]
