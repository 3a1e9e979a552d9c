"""Chunks of a masked ring visit who needs them, and their sums come home."""

from hypothesis import given
from hypothesis import strategies as st

from cpcompile.ops.attention.ring_trips import Trips


@st.composite
def tables(draw):
    ranks = draw(st.integers(1, 8))
    row = st.lists(st.booleans(), min_size=ranks, max_size=ranks).map(tuple)
    table = draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))
    return Trips(table, draw(st.booleans()))


def walk(trips):
    """Where each chunk is in each step, by its own moves."""
    at = {source: source for source in range(trips.ranks)}
    for step, offset in enumerate(trips.offsets):
        yield step, dict(at)
        for source in list(at):
            if trips.goes_on(source, step):
                at[source] = (source + trips.offsets[step + 1]) % trips.ranks
            else:
                del at[source]
        assert offset == trips.offsets[step]


@given(tables())
def test_every_need_is_met_once(trips):
    visits = set()
    for step, at in walk(trips):
        ranks = list(at.values())
        assert len(set(ranks)) == len(ranks)  # one chunk on a rank
        for source, rank in at.items():
            assert trips.source(rank, step) == source
            visits.add((rank, source))
    for rank in range(trips.ranks):
        for source in range(trips.ranks):
            assert not trips.needed[rank][source] or (rank, source) in visits


@given(tables())
def test_a_chunk_goes_no_further_than_it_is_needed(trips):
    for source in range(trips.ranks):
        last = trips.last(source)
        if trips.everywhere:
            assert last == len(trips.offsets) - 1
        elif last:
            end = (source + trips.offsets[last]) % trips.ranks
            assert trips.needed[end][source]


def window(ranks, back, ahead):
    return tuple(
        tuple(-back <= source - rank <= ahead for source in range(ranks))
        for rank in range(ranks)
    )


def test_a_window_has_one_hop():
    assert Trips(window(6, 1, 0)).offsets == (0, 1)
    assert Trips(window(6, 2, 0)).offsets == (0, 1, 2)


def test_a_window_in_both_directions_jumps_over_the_others():
    assert Trips(window(6, 1, 1)).offsets == (0, 1, 5)


def test_nothing_needed_nothing_sent():
    trips = Trips(window(4, 0, 0))
    assert trips.offsets == (0,)
    assert not any(trips.last(source) for source in range(4))
