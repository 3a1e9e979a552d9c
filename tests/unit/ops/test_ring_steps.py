"""The steps of a ring cover what is visible, once, in runs, layouts and masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.layout import Chunks, Layout, Runs, TokenLayout
from cpcompile.ops.step.step_arguments import RingPlace
from cpcompile.ops.strategies.ring_masks import offsets_needed
from cpcompile.ops.strategies.ring_schedule import Ring
from tests.unit.geometry.test_visibility import painted

lengths = st.integers(0, 40)
BALANCED = (Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD)


def rings(q_len, kv_len, causal, ranks, pieces, chunks):
    """The ring of every rank; `chunks` of ranks * pieces * chunks are one run."""
    total = ranks * pieces * chunks
    queries, keys = (
        Runs(length, ranks, Chunks(length, total).size * chunks, pieces)
        for length in (q_len, kv_len)
    )
    return [Ring(queries, keys, causal, "group", r, "forward") for r in range(ranks)]


def positions(runs, rank):
    """Global positions of the tokens that a rank holds, in their order."""
    starts = [runs.start(rank, piece) for piece in range(runs.pieces)]
    counts = [runs.run(rank, piece) for piece in range(runs.pieces)]
    parts = [torch.arange(n) + s for s, n in zip(starts, counts, strict=True)]
    return torch.cat(parts)


def counted(ring, step):
    """How often each (query, packed key) of this rank is computed in a step."""
    source = (ring.rank - step) % ring.steps
    own = torch.zeros(ring.queries.count(ring.rank), ring.keys.padded).long()
    views = ring.split(own.view(1, 1, *own.shape))
    for call in ring.calls(step):
        sizes = views[call.part].shape[2:]
        views[call.part][0, 0] += painted(call.visible.blocks(*sizes), *sizes)
    assert not own[:, ring.keys.count(source) :].any()  # padding is seen by nobody
    return own[:, : ring.keys.count(source)]


@given(
    lengths,
    lengths | st.none(),
    st.booleans(),
    st.integers(1, 4),
    st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (1, 3)]),
)
def test_steps_cover_what_is_visible_once(q_len, kv_len, causal, ranks, runs):
    kv_len = q_len if kv_len is None else kv_len
    for ring in rings(q_len, kv_len, causal, ranks, *runs):
        queries = positions(ring.queries, ring.rank)[:, None]
        for step in range(ranks):
            keys = positions(ring.keys, (ring.rank - step) % ranks)
            seen = keys <= queries if causal else torch.ones(len(queries), len(keys))
            assert torch.equal(counted(ring, step), seen.long())
            assert ring.computes(step) or not seen.any()


@given(lengths, lengths, st.booleans(), st.integers(1, 4), st.integers(1, 3))
def test_every_rank_makes_the_same_calls(q_len, kv_len, causal, ranks, pieces):
    """And each part of the queries has one last call in every step."""
    found = {
        tuple((call.part, call.is_last) for call in ring.calls(step))
        for ring in rings(q_len, kv_len, causal, ranks, pieces, 1)
        for step in range(ranks)
    }
    (calls,) = found
    parts = pieces if causal else 1
    assert [part for part, is_last in calls if is_last] == list(range(parts))


@given(lengths, st.integers(1, 4), st.integers(1, 3))
def test_self_attention_has_one_call_per_run(length, ranks, pieces):
    for ring in rings(length, length, True, ranks, pieces, 1):
        assert len(ring.calls(0)) == pieces


def balanced(layout, length, ranks):
    """The causal ring of every rank."""
    runs, tokens = Runs.contiguous(length, ranks), TokenLayout.of(layout, length, ranks)
    return [Ring(runs, runs, True, "group", r, "forward", tokens) for r in range(ranks)]


@given(lengths, st.integers(1, 5), st.sampled_from(BALANCED))
def test_steps_cover_what_is_visible_in_layouts(length, ranks, layout):
    """In one call, and `computes` is exact: what hides a message follows from it."""
    for ring in balanced(layout, length, ranks):
        queries = ring.tokens.positions(ring.rank)[:, None]
        for step in range(ranks):
            keys = ring.tokens.positions((ring.rank - step) % ranks)
            seen = keys <= queries
            assert torch.equal(counted(ring, step), seen.long())
            assert ring.computes(step) == seen.any()
            assert [(call.part, call.is_last) for call in ring.calls(step)] == [
                (0, True)
            ]


@pytest.mark.parametrize("length", [64, 61, 9])
def test_zigzag_is_rectangles_after_the_first_step(length):
    for ring in balanced(Layout.ZIGZAG, length, 4):
        rows = ring.queries.count(ring.rank)
        for step in range(1, 4):
            (call,) = ring.calls(step)
            blocks = call.visible.blocks(rows, ring.keys.size)
            assert [block.triangular for block in blocks] in ([False], [])


@pytest.mark.parametrize("layout", BALANCED)
def test_every_rank_has_equal_work(layout):
    """Within one score for each query; a contiguous ring has 2 - 1/N = 1.75 of it."""
    pairs = [
        sum(
            call.visible.pairs(16, 16) for step in range(4) for call in ring.calls(step)
        )
        for ring in balanced(layout, 64, 4)
    ]
    assert sum(pairs) == 64 * 65 // 2
    assert max(pairs) - min(pairs) <= 3 * 16


@st.composite
def tables(draw):
    ranks = draw(st.integers(1, 8))
    row = st.lists(st.booleans(), min_size=ranks, max_size=ranks).map(tuple)
    return draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple))


def masked_rings(needed):
    runs, offsets = Runs.contiguous(64, len(needed)), offsets_needed(needed)
    ranks = range(len(needed))
    return [Ring(runs, runs, False, "", r, "forward", offsets=offsets) for r in ranks]


@given(tables())
def test_chunks_that_are_needed_arrive_once_and_come_home(needed):
    for rank, ring in enumerate(masked_rings(needed)):
        sources = [ring.source(step) for step in range(ring.steps)]
        assert sources[0] == rank
        assert len(set(sources)) == len(sources)
        assert {s for s, is_needed in enumerate(needed[rank]) if is_needed} <= {
            *sources
        }
    every = masked_rings(needed)
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
