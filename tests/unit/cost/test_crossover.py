"""Where decisions change: regions against brute force, and what is out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.cost.crossover import Interval, region, regions, with_length
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Candidate, Plan, Strategy
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from tests.unit.cost.cost_cases import LLAMA

CALL = replace(LLAMA, causal=False, ranks=4)
PROFILE = load_profile("a800_pcie")


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


def test_keys_keep_their_ratio() -> None:
    crossed = replace(CALL, q_len=1000, kv_len=500)
    assert with_length(crossed, 4000) == replace(crossed, q_len=4000, kv_len=2000)
