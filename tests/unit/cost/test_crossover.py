"""Where decisions change: regions against brute force, and what is out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.cost.choose import choose
from cpcompile.cost.crossover import Interval, region, regions, with_length
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Candidate, Plan, Strategy
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from tests.unit.cost.cost_cases import LLAMA

CALL = replace(LLAMA, causal=False, ranks=4)
PROFILE = load_profile("a800_pcie")


def decide(size: int) -> Plan:
    return choose(with_length(CALL, size), PROFILE)


def steps(*edges: int):
    """A decision that changes at each of `edges`, and is impossible after the last."""

    def at(size: int) -> Plan:
        index = sum(size >= edge for edge in edges)
        if index == len(edges):
            raise RewriteError("too long")
        chosen = Candidate(Strategy.HYBRID, CPDegrees(index + 2, 2), seconds=1.0)
        return Plan(CALL, chosen, False, PROFILE, (chosen,))

    return at


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(2, 10**6), min_size=1, max_size=4, unique=True),
    st.integers(1, 2 * 10**6),
)
def test_edges_are_found_to_the_token(edges: list[int], size: int) -> None:
    # Edges that a grid of factor 2 ** (1/4) cannot miss.
    edges = sorted(edges)
    kept = [e for e, n in zip(edges, [*edges[1:], 10**9], strict=True) if n > 1.5 * e]
    found = region(steps(*kept), size, 1, 10**7)
    low = max([1, *(e for e in kept if e <= size)])
    high = min([10**7, *(e for e in kept if e > size)])
    assert (found.low, found.high) == (low, high)


def test_regions_have_no_gaps_and_end_where_nothing_is_possible() -> None:
    found = regions(steps(100, 1000), 1, 5000)
    assert found == [
        Interval(1, 100, "hybrid 2 in 2 (ring)"),
        Interval(100, 1000, "hybrid 3 in 2 (ring)"),
        Interval(1000, 5000, None),
    ]


def test_a_region_agrees_with_choose_on_both_sides_of_its_edges() -> None:
    found = region(decide, CALL.q_len, 4, 1 << 20)
    assert found.low > 4 and found.high < 1 << 20  # or there is nothing to test
    inside = decide(CALL.q_len).chosen.label
    assert found.label == inside
    for size in (found.low, found.high - 1):
        assert decide(size).chosen.label == inside
    for size in (found.low - 1, found.high):
        assert decide(size).chosen.label != inside


def test_the_crossover_is_a_zero_of_the_difference() -> None:
    """Without ties it is where the two expressions are equal."""

    def exact(size: int) -> Plan:
        return choose(with_length(CALL, size), PROFILE, tie_fraction=0.0)

    edge = region(exact, CALL.q_len, 4, 1 << 20).low
    before, after = exact(edge - 1).chosen, exact(edge).chosen
    forms = [(c.strategy, c.degrees) for c in (before, after)]
    assert forms[0] != forms[1]

    def seconds(size: int) -> list[float]:
        costs = {(c.strategy, c.degrees): c.seconds for c in exact(size).candidates}
        return [costs[form] or 0.0 for form in forms]

    first, second = seconds(edge - 1)
    assert first <= second
    first, second = seconds(edge)
    assert first >= second
    assert first == pytest.approx(second, rel=1e-3)


def test_keys_keep_their_ratio() -> None:
    crossed = replace(CALL, q_len=1000, kv_len=500)
    assert with_length(crossed, 4000) == replace(crossed, q_len=4000, kv_len=2000)
