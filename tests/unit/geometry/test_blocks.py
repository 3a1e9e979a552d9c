"""Rectangles and triangles cover what is visible, each pair once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.blocks import Block, live_pairs, square, visible_blocks
from cpcompile.geometry.layout import Chunks
from tests.unit.geometry.painting import painted

lengths = st.integers(0, 70)
ranks = st.integers(1, 9)
small = st.integers(0, 12)


def dense_mask(q_start, q_count, k_start, k_count, causal):
    """What the queries see of the keys, from the definition."""
    rows = torch.arange(q_start, q_start + q_count)[:, None]
    keys = torch.arange(k_start, k_start + k_count)
    return keys <= rows if causal else torch.ones(q_count, k_count, dtype=torch.bool)


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
    apart = Block(1, 7, 3, 4, True, 2)
    assert square(apart) == (Block(1, 4, 3, 4, True, 2), Block(9, 3, 3, 4, False, 2))


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
