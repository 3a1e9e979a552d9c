"""The cheapest sides of a graph, against all assignments."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from networkx import NetworkXUnbounded

from cpcompile.passes.model.layouts.layout_cut import LayoutCut

# Powers of two of seconds: sums of few are exact. None is a side that cannot be.
SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])
PRICE = st.none() | SECONDS


@st.composite
def graphs(draw):
    """(prices of either side by vertex, pairs on one side, values that are fed)."""
    count = draw(st.integers(1, 6))
    vertex = st.integers(0, count - 1)
    prices = draw(st.lists(st.tuples(PRICE, PRICE), min_size=count, max_size=count))
    same = draw(st.lists(st.tuples(vertex, vertex), max_size=2))
    consumers = st.lists(vertex, min_size=1, max_size=3)
    feeds = draw(st.lists(st.tuples(vertex, consumers, PRICE), max_size=6))
    return prices, same, feeds


def solve(prices, same=(), feeds=()):
    """The vertices that LayoutCut lays out."""
    cut = LayoutCut()
    for vertex, (contiguous, laid_out) in enumerate(prices):
        cut.add(vertex, contiguous, laid_out)
    for one, other in same:
        cut.same(one, other)
    for number, (producer, consumers, seconds) in enumerate(feeds):
        cut.feed(producer, consumers, ("value", number), seconds)
    return cut.solve() & set(range(len(prices)))


def cost(laid_out, prices, same, feeds):
    """Seconds of an assignment, or None if it cannot be."""
    parts = [prices[vertex][vertex in laid_out] for vertex in range(len(prices))]
    for producer, consumers, seconds in feeds:
        if any((c in laid_out) != (producer in laid_out) for c in consumers):
            parts.append(seconds)
    if any((one in laid_out) != (other in laid_out) for one, other in same):
        return None
    return None if None in parts else sum(parts)


def assignments(count):
    for chosen in itertools.product((False, True), repeat=count):
        yield {vertex for vertex in range(count) if chosen[vertex]}


@settings(max_examples=300)
@given(graphs())
def test_the_least_of_the_cheapest(graph):
    prices = graph[0]
    costs = [(cost(a, *graph), a) for a in assignments(len(prices))]
    possible = [each for each, _ in costs if each is not None]
    if not possible:
        with pytest.raises(NetworkXUnbounded):
            solve(*graph)
        return
    cheapest = [a for each, a in costs if each == min(possible)]
    assert solve(*graph) == set.intersection(*cheapest)
    assert solve(*graph) in cheapest


# Three consumers that each save 0.5 s pay 1 s together.
SHARED = [(0.0, None), *[(0.5, 0.0)] * 3]
TOWARDS = [(4.0, 0.0), (0.0, None)]
NEAR = [(1e3, 1e3 - 1e-9), (1e3, 1e3), (1e3 - 1e-9, 1e3)]
STAYING = [NEAR[0], (1e3, None)]


@pytest.mark.parametrize(
    ("prices", "feeds", "laid_out"),
    [
        ([(1.0, 1.0)], [], set()),  # nothing for nothing
        ([(1.0, 0.5)], [], {0}),
        (SHARED, [(0, [1, 2, 3], 1.0)], {1, 2, 3}),
        (SHARED, [(0, [consumer], 1.0) for consumer in (1, 2, 3)], set()),
        (TOWARDS, [(0, [1], 1.0)], {0}),  # either direction is paid for
        (TOWARDS, [(0, [1], 5.0)], set()),
        ([(4.0, 0.0), (0.0, 1.0)], [(0, [1], None)], {0, 1}),  # on one side
        # A nanosecond next to a quarter of an hour, and where a relayout costs as much.
        (NEAR, [], {0}),
        (NEAR[:2], [(0, [1], 1e-9)], {0, 1}),
        (STAYING, [(0, [1], 0.5e-9)], {0}),
        (STAYING, [(0, [1], 2e-9)], set()),
        ([(1e-16, 0.0)], [], set()),  # less than a femtosecond is nothing
        ([(1e-15, 0.0)], [], {0}),
    ],
)
def test_what_is_laid_out(prices, feeds, laid_out):
    assert solve(prices, feeds=feeds) == laid_out


def test_sums_of_tenths_are_exact():
    """0.1 + 0.2 against 0.3: as floats these differ, and the cut is no tie."""
    prices = [(0.1, 0.0), (0.2, 0.0), (0.0, 0.3)]
    assert solve(prices, same=[(0, 1), (1, 2)]) == set()


@pytest.mark.parametrize("pair", [{"feeds": [(0, [1], None)]}, {"same": [(0, 1)]}])
def test_two_sides_that_cannot_be(pair):
    with pytest.raises(NetworkXUnbounded):
        solve([(None, 0.0), (0.0, None)], **pair)
