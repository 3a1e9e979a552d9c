"""Chunks partition a sequence as torch.chunk does; blocks cover what is visible."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from cpcompile.blocks import Block, live_pairs, square, visible_blocks
from cpcompile.head_split import HeadSplit
from cpcompile.layout import Chunks, Runs

lengths = st.integers(0, 70)
ranks = st.integers(1, 9)
small = st.integers(0, 12)


def dense_mask(q_start, q_count, k_start, k_count, causal):
    """What the queries see of the keys, from the definition."""
    rows = torch.arange(q_start, q_start + q_count)[:, None]
    keys = torch.arange(k_start, k_start + k_count)
    return keys <= rows if causal else torch.ones(q_count, k_count, dtype=torch.bool)


def painted(blocks, q_count, k_count):
    """How many blocks compute each pair."""
    counts = torch.zeros(q_count, k_count, dtype=torch.int64)
    for block in blocks:
        ones = torch.ones(block.rows, block.keys, dtype=torch.int64)
        view = counts.narrow(0, block.row, block.rows)
        view.narrow(1, block.key, block.keys).add_(
            ones.tril() if block.triangular else ones
        )
    return counts


@given(lengths, ranks)
def test_chunks_partition_the_sequence(length, ranks):
    chunks = Chunks(length, ranks)
    positions = [
        position
        for rank in range(ranks)
        for position in range(
            chunks.start(rank), chunks.start(rank) + chunks.count(rank)
        )
    ]
    assert positions == list(range(length))
    assert chunks.size == max(chunks.count(rank) for rank in range(ranks))


@given(lengths, ranks)
def test_chunks_agree_with_torch_chunk(length, ranks):
    chunks = Chunks(length, ranks)
    parts = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        start, count = chunks.start(rank), chunks.count(rank)
        expected = parts[rank].tolist() if rank < len(parts) else []
        assert list(range(start, start + count)) == expected


@given(lengths, ranks)
def test_chunks_agree_with_dtensor(length, ranks):
    chunks = Chunks(length, ranks)
    for rank in range(ranks):
        assert Shard.local_shard_size_and_offset(length, ranks, rank) == (
            chunks.count(rank),
            chunks.start(rank),
        )


@given(small, small, small, small, st.booleans())
def test_blocks_cover_each_visible_pair_once(
    q_start, q_count, k_start, k_count, causal
):
    blocks = visible_blocks(q_start, q_count, k_start, k_count, causal)
    mask = dense_mask(q_start, q_count, k_start, k_count, causal)
    assert torch.equal(painted(blocks, q_count, k_count), mask.long())
    assert live_pairs(blocks) == mask.sum()


@given(small, small, small, small, st.booleans())
def test_each_row_of_a_block_sees_a_key(q_start, q_count, k_start, k_count, causal):
    for block in visible_blocks(q_start, q_count, k_start, k_count, causal):
        assert block.rows > 0
        assert block.keys > 0
        assert (
            painted((block,), q_count, k_count).sum(1)[block.row :][: block.rows].all()
        )


@given(small, small, small, small, st.booleans())
def test_square_triangles_compute_the_same(q_start, q_count, k_start, k_count, causal):
    blocks = visible_blocks(q_start, q_count, k_start, k_count, causal)
    squares = tuple(part for block in blocks for part in square(block))
    expected = painted(blocks, q_count, k_count)
    assert torch.equal(painted(squares, q_count, k_count), expected)
    assert all(b.rows == b.keys for b in squares if b.triangular)
    assert all(b.rows > 0 and b.keys > 0 for b in squares)
    assert live_pairs(squares) == live_pairs(blocks)


def test_square_triangles():
    rectangle, triangle = Block(1, 2, 3, 4, False), Block(1, 4, 3, 4, True)
    assert square(rectangle) == (rectangle,)
    assert square(triangle) == (triangle,)
    assert square(Block(1, 4, 3, 6, True)) == (triangle,)
    assert square(Block(1, 7, 3, 4, True)) == (triangle, Block(5, 3, 3, 4, False))


@given(lengths, lengths, ranks, st.booleans())
def test_all_steps_of_all_ranks_are_the_attention(q_len, kv_len, ranks, causal):
    """Queries and keys of different lengths: is_causal counts from the first key."""
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    counts = torch.zeros(q_len, kv_len, dtype=torch.int64)
    for rank in range(ranks):
        for source in range(ranks):
            place = (
                queries.start(rank),
                queries.count(rank),
                keys.start(source),
                keys.count(source),
            )
            part = painted(visible_blocks(*place, causal), place[1], place[3])
            counts.narrow(0, *place[:2]).narrow(1, *place[2:]).add_(part)
    assert torch.equal(counts, dense_mask(0, q_len, 0, kv_len, causal).long())


def test_the_three_shapes_of_a_ring_step():
    assert visible_blocks(4, 4, 0, 4, True) == (Block(0, 4, 0, 4, False),)
    assert visible_blocks(4, 4, 4, 4, True) == (Block(0, 4, 0, 4, True),)
    assert visible_blocks(0, 4, 4, 4, True) == ()


def test_gathered_keys_are_a_rectangle_and_a_triangle():
    assert visible_blocks(4, 4, 0, 8, True) == (
        Block(0, 4, 0, 4, False),
        Block(0, 4, 4, 4, True),
    )


@given(st.integers(1, 64), ranks)
def test_the_work_of_the_last_rank(size, ranks):
    """Causal and contiguous: 2 - 1/N of the mean, less the half diagonal."""
    chunks = Chunks(size * ranks, ranks)
    pairs = [
        live_pairs(visible_blocks(chunks.start(r), size, 0, size * ranks, True))
        for r in range(ranks)
    ]
    length = size * ranks
    assert sum(pairs) == length * (length + 1) // 2
    assert pairs[-1] == size * (2 * length - size + 1) // 2


@given(lengths, ranks)
def test_one_run_is_the_contiguous_layout(length, ranks):
    runs, chunks = Runs.contiguous(length, ranks), Chunks(length, ranks)
    assert runs.padded == chunks.size
    for rank in range(ranks):
        assert runs.start(rank) == chunks.start(rank)
        assert runs.count(rank) == chunks.count(rank)


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
