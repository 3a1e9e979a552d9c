"""Rectangles and triangles cover what is visible, each pair once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.blocks import Block, live_pairs, square, visible_blocks
from tests.unit.geometry.painting import painted

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
    for block in blocks:
        assert block.rows > 0 and block.keys > 0
        seen = painted((block,), q_count, k_count).sum(1)
        assert seen[block.row :][: block.rows].all()


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


def test_the_shapes_of_a_ring_step_and_of_gathered_keys():
    earlier, own = Block(0, 4, 0, 4, False), Block(0, 4, 0, 4, True)
    assert visible_blocks(4, 4, 0, 4, True) == (earlier,)
    assert visible_blocks(4, 4, 4, 4, True) == (own,)
    assert visible_blocks(0, 4, 4, 4, True) == ()
    gathered = (earlier, Block(0, 4, 4, 4, True))
    assert visible_blocks(4, 4, 0, 8, True) == gathered
