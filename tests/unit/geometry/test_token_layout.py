"""Every layout, against positions and a dense mask, and the work of its ranks."""

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks, Layout, Runs, TokenLayout
from cpcompile.geometry.visibility import visible_tokens
from cpcompile.geometry.work_map import work
from tests.unit.cost.cost_cases import positions as defined

MOST_TOKENS, MOST_RANKS = 64, 8
ALL_RANKS = range(1, MOST_RANKS + 1)


def token_layouts(layout, ranks, multiple=1, start=0):
    """One for each length that is a multiple of `multiple`."""
    lengths = range(start, MOST_TOKENS + 1, multiple)
    return [TokenLayout.of(layout, length, ranks) for length in lengths]


def positions(tokens):
    """Of each rank, as lists."""
    return [tokens.positions(rank).tolist() for rank in range(tokens.ranks)]


def padded(tokens, filler):
    """Positions [ranks, size], `filler` where a rank has fewer tokens."""
    table = torch.full((tokens.ranks, tokens.size), filler)
    for rank in range(tokens.ranks):
        table[rank, : tokens.count(rank)] = tokens.positions(rank)
    return table


def visible_by_position(tokens):
    """bool [rank, source, row, key]: what is seen, from positions alone."""
    queries, keys = padded(tokens, -1), padded(tokens, tokens.length)
    return keys[None, :, None, :] <= queries[:, None, :, None]


def visible_by_limits(tokens):
    """The same from `visible_tokens`, by the docstring of Visible."""
    size, ranks = tokens.size, range(tokens.ranks)
    row, key = torch.arange(size).unsqueeze(1), torch.arange(size)
    none = (-1, size), (-1, size), (size, size)
    limits = []
    for rank in ranks:
        for source in ranks:
            visible = visible_tokens(tokens, rank, source)
            given = visible.rows, visible.keys, visible.upper
            limits.append([x or y for x, y in zip(given, none, strict=True)])
    table = torch.tensor(limits).view(len(ranks), len(ranks), 6, 1, 1)
    row_start, row_stop, key_start, key_stop, even, odd = table.unbind(2)
    held = row < padded(tokens, -1).ge(0).sum(1).view(-1, 1, 1, 1)
    return (
        (held & (row_start <= row) & (row < row_stop))
        & ((key_start <= key) & (key < key_stop))
        & (key < row + torch.where(row % 2 == 0, even, odd))
    )


def pairs_of_steps(tokens):
    """Pairs [rank][step] of a ring."""
    N, size = tokens.ranks, tokens.size
    return [
        [
            visible_tokens(tokens, r, (r - t) % N).pairs(tokens.count(r), size)
            for t in range(N)
        ]
        for r in range(N)
    ]


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", Layout)
def test_the_sequence_is_permuted(layout, ranks):
    # A tensor in a layout is the permuted one, cut as torch.chunk cuts it.
    for tokens in token_layouts(layout, ranks):
        every = torch.arange(tokens.length)
        order, inverse = tokens.permutation(), tokens.inverse()
        assert torch.equal(order.sort().values, every)
        assert torch.equal(order[inverse], every)
        assert torch.equal(inverse[order], every)
        parts = list(order.chunk(ranks)) + [order[:0]] * ranks
        for rank, part in zip(range(ranks), parts, strict=False):
            assert torch.equal(tokens.positions(rank), part)
            assert tokens.count(rank) == len(part) <= tokens.size
            assert (part.diff() > 0).all()
    for tokens in token_layouts(layout, ranks, even(layout, ranks)):
        assert positions(tokens) == defined(tokens.length, ranks, layout)
        if layout is Layout.ZIGZAG:
            assert {tokens.head(rank) for rank in range(ranks)} == {tokens.size // 2}


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", Layout)
def test_what_a_rank_sees_of_another(layout, ranks):
    """Neither more nor less, and nothing of the padding."""
    for tokens in token_layouts(layout, ranks, start=1):
        expected = visible_by_position(tokens)
        assert torch.equal(visible_by_limits(tokens), expected), tokens
        by_source = torch.tensor(pairs_of_steps(tokens))
        steps = torch.arange(ranks)
        sources = (steps.unsqueeze(1) - steps) % ranks
        counted = expected.sum((2, 3)).gather(1, sources)
        assert torch.equal(by_source, counted), tokens
        assert by_source.sum() == tokens.length * (tokens.length + 1) // 2


def even(layout, ranks):
    """Of how many tokens every rank has equally many: there are no ragged parts."""
    return 2 * ranks if layout is Layout.ZIGZAG else ranks


RAGGED = {
    Layout.CONTIGUOUS: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]],
    Layout.ZIGZAG: [[0, 1, 9], [2, 7, 8], [3, 4, 6], [5]],
    Layout.STRIPED: [[0, 4, 7], [1, 5, 8], [2, 6, 9], [3]],
    Layout.FOLD: [[0, 6, 7], [1, 5, 8], [2, 4, 9], [3]],
}


@pytest.mark.parametrize("layout", Layout)
def test_ten_tokens_on_four_ranks(layout):
    assert positions(TokenLayout.of(layout, 10, 4)) == RAGGED[layout]


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG])
def test_consecutive_ranks_are_one_rank(layout, ranks):
    """What u ranks hold is what a rank of N / u holds, half by half."""
    for u in (u for u in ALL_RANKS if ranks % u == 0):
        for fine in token_layouts(layout, ranks):
            coarse = TokenLayout(layout, fine.length, ranks // u, fine.size * u)
            parts = [torch.tensor(x, dtype=torch.int64) for x in positions(fine)]
            for rank, held in enumerate(positions(coarse)):
                group = range(rank * u, (rank + 1) * u)
                together = torch.cat([parts[r] for r in group]).sort().values
                assert held == together.tolist()
                assert coarse.head(rank) == sum(fine.head(r) for r in group)
                heads = [parts[r][: fine.head(r)] for r in group]
                tails = [parts[r][fine.head(r) :] for r in reversed(group)]
                if layout is Layout.ZIGZAG:
                    assert held == torch.cat([*heads, *tails]).tolist()


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG])
def test_what_coarse_ranks_see(layout):
    """A composed token_layout need not be one of `TokenLayout.of`."""
    for length in range(1, MOST_TOKENS + 1):
        fine = TokenLayout.of(layout, length, 8)
        coarse = TokenLayout(layout, length, 4, fine.size * 2)
        every = torch.arange(length)
        assert torch.equal(coarse.permutation()[coarse.inverse()], every)
        assert torch.equal(visible_by_limits(coarse), visible_by_position(coarse))


lengths = st.integers(0, 70)
ranks = st.integers(1, 9)


@given(lengths, ranks)
def test_chunks_are_those_of_torch_chunk_and_of_dtensor(length, ranks):
    chunks = Chunks(length, ranks)
    parts = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        start, count = chunks.start(rank), chunks.count(rank)
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(start, start + count)) == expected
        of_dtensor = Shard.local_shard_size_and_offset(length, ranks, rank)
        assert of_dtensor == (count, start)
    assert chunks.size == max(chunks.count(rank) for rank in range(ranks))


@given(lengths, ranks, st.integers(1, 4))
def test_runs_partition_the_sequence(length, ranks, pieces):
    """As the chunks of ranks * pieces ranks, of which every ranks-th lies together."""
    chunks = Chunks(length, ranks * pieces)
    runs = Runs(length, ranks, chunks.size, pieces)
    found = []
    for rank in range(ranks):
        held = []
        for piece in range(pieces):
            assert runs.offset(rank, piece) == len(held)
            place = piece * ranks + rank
            assert runs.start(rank, piece) == chunks.start(place)
            assert runs.run(rank, piece) == chunks.count(place)
            start = runs.start(rank, piece)
            held += range(start, start + runs.run(rank, piece))
        assert runs.count(rank) == len(held) <= runs.padded
        found += held
    assert sorted(found) == list(range(length))


@given(st.integers(1, 6), st.integers(1, 6), ranks)
def test_every_query_head_meets_its_key_head(kv_heads, group, ranks):
    heads = kv_heads * group
    split = HeadSplit(heads, kv_heads, ranks)
    queries = HeadSplit(heads, heads, ranks)
    assert queries.copies == 1
    assert queries.kv_per_rank == split.per_rank == queries.per_rank
    assert split.places <= split.kv_per_rank * ranks
    of_place = [head for head in range(kv_heads) for _ in range(split.copies)]
    for head in range(heads):
        rank, slot = divmod(head, split.per_rank)
        run = split.per_rank // split.kv_per_rank  # what the kernel groups by
        place = rank * split.kv_per_rank + slot // run
        assert of_place[place] == head // group


def test_key_heads_are_repeated_as_far_as_needed():
    def keys(heads, kv_heads, ranks):
        split = HeadSplit(heads, kv_heads, ranks)
        return split.per_rank, split.kv_per_rank, split.copies

    assert keys(32, 8, 4) == (8, 2, 1)  # the heads divide: nothing is repeated
    assert keys(32, 8, 16) == (2, 1, 2)  # two ranks read each
    assert keys(8, 1, 4) == (2, 1, 4)
    assert keys(4, 1, 8) == (1, 1, 4)  # ranks without a query head get none
    assert keys(12, 2, 3) == (4, 2, 3)  # rank 1 reads both; two places on every rank
    assert keys(6, 6, 4) == (2, 2, 1)


some_lengths = st.integers(1, 40)
BALANCED = [layout for layout in Layout if layout is not Layout.CONTIGUOUS]


def counted_by_position(queries, keys, causal):
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
@given(
    q_len=some_lengths,
    kv_len=some_lengths,
    ranks=st.integers(1, 8),
    causal=st.booleans(),
)
@settings(deadline=None)
def test_work_is_what_brute_force_counts(layout, q_len, kv_len, ranks, causal):
    if layout is not Layout.CONTIGUOUS:
        kv_len = q_len
    queries, keys = (TokenLayout.of(layout, n, ranks) for n in (q_len, kv_len))
    table = work(layout, q_len, kv_len, ranks, causal=causal)
    assert table.tolist() == counted_by_position(queries, keys, causal)


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
