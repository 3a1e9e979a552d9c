"""Pairs by rank and step are counted exactly, by the definition of each layout."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.work_map import work

lengths = st.integers(1, 40)
BALANCED = [layout for layout in Layout if layout is not Layout.CONTIGUOUS]


def counted(queries, keys, causal):
    """Pairs [rank, step] from positions."""
    ranks = range(queries.ranks)
    q_positions = [queries.positions(rank).unsqueeze(1) for rank in ranks]
    k_positions = [keys.positions(rank) for rank in ranks]
    return [
        [int((k <= q).sum()) if causal else q.numel() * k.numel() for k in row]
        for rank, q in zip(ranks, q_positions, strict=True)
        for row in [[k_positions[(rank - step) % queries.ranks] for step in ranks]]
    ]


@pytest.mark.parametrize("layout", Layout)
@given(q_len=lengths, kv_len=lengths, ranks=st.integers(1, 8), causal=st.booleans())
@settings(deadline=None)
def test_work_is_what_brute_force_counts(layout, q_len, kv_len, ranks, causal):
    if layout is not Layout.CONTIGUOUS:
        kv_len = q_len
    queries, keys = (TokenLayout.of(layout, n, ranks) for n in (q_len, kv_len))
    table = work(layout, q_len, kv_len, ranks, causal=causal)
    assert table.tolist() == counted(queries, keys, causal)


@pytest.mark.parametrize("layout", BALANCED)
def test_other_layouts_need_equal_lengths(layout):
    with pytest.raises(ValueError) as caught:
        work(layout, 16, 24, 4, causal=True)
    assert str(caught.value) == (
        f"{layout.value} layout: got 16 queries and 24 keys; it needs as many queries "
        "as keys"
    )


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", [2**27, 2**27 - 12345])
def test_a_thousand_ranks(layout, length):
    """Quick, and without an overflow."""
    ranks = 1024
    start = time.process_time()
    table = work(layout, length, length, ranks, causal=True)
    assert time.process_time() - start < 1
    assert table.dtype == np.int64
    assert int(table.sum()) == length * (length + 1) // 2
    if layout is Layout.CONTIGUOUS:
        assert table[0, 1:].sum() == 0
        last, mean = int(table.sum(axis=1).max()), int(table.sum()) / ranks
        assert last / mean == pytest.approx(2 - 1 / ranks, rel=1e-3)
    elif length % ranks == 0:
        assert table.sum(axis=1).max() / table.sum(axis=1).min() < 1 + 1e-2


def test_the_page_shows_these_numbers():
    page = Path(__file__).parents[3].joinpath("docs", "layouts.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for length, shown in rows:
        cells = []
        for layout in Layout:
            table = work(layout, int(length), int(length), 8, causal=True)
            mean = table.sum() / 8
            slowest, of_steps = table.sum(axis=1).max(), table.max(axis=0).sum()
            cells.append(f"{slowest / mean:.4f} / {of_steps / mean:.4f}")
        assert shown.split(" | ") == cells
