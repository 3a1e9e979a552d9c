"""Rectangles and triangles cover what is visible, each pair once."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.geometry.blocks import live_pairs, square, visible_blocks
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
