"""Pairs by rank and step are counted exactly, by the definition of each layout."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.drawing.work import held, work
from cpcompile.plans import Layout

RANKS = 4


def positions(layout, length, ranks, rank):
    """Where the tokens of a rank are."""
    return [
        run.start + i * run.stride
        for run in held(layout, length, ranks, rank)
        for i in range(run.count)
    ]


def test_the_definitions():
    """Of 16 tokens on 4 ranks."""
    of = {x: [positions(x, 16, RANKS, r) for r in range(RANKS)] for x in Layout}
    assert of[Layout.CONTIGUOUS][1] == [4, 5, 6, 7]
    assert of[Layout.ZIGZAG][1] == [2, 3, 12, 13]
    assert of[Layout.STRIPED][1] == [1, 5, 9, 13]
    assert of[Layout.FOLD][1] == [1, 9, 6, 14]


@pytest.mark.parametrize("layout", Layout)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_work_is_what_brute_force_counts(layout, data):
    ranks = data.draw(st.integers(1, 6))
    q_len, kv_len = (data.draw(st.integers(1, 40)) for _ in "qk")
    causal = data.draw(st.booleans())
    queries = [positions(layout, q_len, ranks, r) for r in range(ranks)]
    keys = [positions(layout, kv_len, ranks, r) for r in range(ranks)]
    assert sorted(chain(*queries)) == list(range(q_len))
    table = work(layout, q_len, kv_len, ranks, causal=causal)
    for rank in range(ranks):
        for step in range(ranks):
            seen = keys[(rank - step) % ranks]
            expected = sum(k <= q or not causal for q in queries[rank] for k in seen)
            assert table[rank, step] == expected, (rank, step)


@pytest.mark.parametrize("layout", Layout)
def test_long_sequences_on_many_ranks_do_not_overflow(layout):
    length, ranks = 2**27, 1024
    table = work(layout, length, length, ranks, causal=True)
    assert int(table.sum()) == length * (length + 1) // 2
    if layout is Layout.CONTIGUOUS:
        assert table[0, 1:].sum() == 0
        last, mean = int(table[-1].sum()), int(table.sum()) / ranks
        assert last / mean == pytest.approx(2 - 1 / ranks, rel=1e-6)
    else:
        assert table.sum(axis=1).max() / table.sum(axis=1).min() < 1 + 1e-2
