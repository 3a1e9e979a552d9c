"""Which distances a ring under a mask has, and how its place is told to operators."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.layout import Layout, Runs
from cpcompile.ops.step.step_arguments import RingPlace
from cpcompile.ops.strategies.ring_masks import offsets_needed
from cpcompile.ops.strategies.ring_schedule import Ring


@st.composite
def tables(draw):
    ranks = draw(st.integers(1, 8))
    row = st.lists(st.booleans(), min_size=ranks, max_size=ranks).map(tuple)
    return draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))


def rings(needed):
    runs, offsets = Runs.contiguous(64, len(needed)), offsets_needed(needed)
    ranks = range(len(needed))
    return [Ring(runs, runs, False, "", r, "forward", offsets=offsets) for r in ranks]


@given(tables())
def test_every_need_is_met_once(needed):
    for rank, ring in enumerate(rings(needed)):
        sources = [ring.source(step) for step in range(ring.steps)]
        assert sources[0] == rank
        assert len(set(sources)) == len(sources)
        assert {s for s, is_needed in enumerate(needed[rank]) if is_needed} <= {
            *sources
        }


@given(tables())
def test_chunks_arrive_where_they_are_expected_and_come_home(needed):
    every = rings(needed)
    at = list(range(len(needed)))  # by source, the rank that has its chunk
    for step in range(every[0].steps):
        for source, rank in enumerate(at):
            assert every[rank].source(step) == source
        distance = every[0].offset(step + 1) - every[0].offset(step)
        at = [(rank + distance) % len(needed) for rank in at]
    assert at == list(range(len(needed)))


def window(ranks, back, ahead):
    return tuple(
        tuple(-back <= source - rank <= ahead for source in range(ranks))
        for rank in range(ranks)
    )


@pytest.mark.parametrize(
    ("needed", "offsets"),
    [
        (window(4, 1, 0), (0, 1)),
        (window(4, 1, 1), (0, 1, 3)),
        (window(4, 0, 0), (0,)),
        (window(4, 4, 0), (0, 1, 2, 3)),
        (((False,),), (0,)),
    ],
)
def test_the_distances(needed, offsets):
    assert offsets_needed(needed) == offsets


@given(
    st.integers(0, 99),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from(Layout),
)
def test_a_place_is_told_as_integers(length, ranks, size, pieces, layout):
    queries, keys = Runs(length, ranks, size, pieces), Runs.contiguous(length, ranks)
    place = RingPlace(queries, keys, layout, ranks - 1, 0)
    assert RingPlace.of_list(place.to_list()) == place
