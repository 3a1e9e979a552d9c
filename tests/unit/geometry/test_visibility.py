"""Blocks cover what is visible, once; a Visible is what its three fields say."""

from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpcompile.geometry.blocks import live_pairs, square, visible_blocks
from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.visibility import (
    Visible,
    upper_of_rows,
    visible_chunk,
)
from tests.unit.step.step_cases import mask_of

sizes = st.integers(0, 9)
limits = st.integers(-11, 11)
ranges = st.none() | st.tuples(st.integers(0, 11), st.integers(0, 11))
pairs = st.none() | st.tuples(limits, limits)
equal_pairs = st.none() | limits.map(lambda x: (x, x))
visibles = st.builds(Visible, rows=ranges, keys=ranges, upper=equal_pairs | pairs)
lengths = st.integers(0, 40)


def mask(rows, keys, rule):
    """[rows, keys], True where rule(row, key)."""
    values = [[rule(i, j) for j in range(keys)] for i in range(rows)]
    return torch.tensor(values, dtype=torch.bool).view(rows, keys)


@settings(deadline=None)
@given(visibles, sizes, sizes)
@example(Visible(rows=(2, 5), keys=(1, 7), upper=(1, 1)), 6, 8)
@example(Visible(rows=(1, 6), keys=(2, 7), upper=(-1, 4)), 6, 8)
def test_blocks_cover_each_visible_pair_once(visible, rows, keys):
    blocks = visible.blocks(rows, keys)
    expected = mask_of(visible, rows, keys)
    for each in (blocks, [part for block in blocks for part in square(block)]):
        assert torch.equal(painted(each, rows, keys), expected.long())
        assert all(b.rows > 0 and b.keys > 0 for b in each)


@pytest.mark.parametrize("upper", [(1, 0), (0, 1)])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 1024])
def test_fold_is_four_triangles(upper, size):
    """Of every second row and every second key."""
    blocks = Visible(upper=upper).blocks(size, size)
    assert len(blocks) <= 4
    assert all(b.triangular and b.step == 2 for b in blocks)


def test_pairs_are_not_counted_one_by_one():
    size = 10**12
    triangle = size * (size + 1) // 2
    assert Visible(upper=(1, 0)).pairs(size, size) == triangle - size // 2


@given(visibles, sizes, sizes)
def test_pairs_are_counted(visible, rows, keys):
    seen = mask_of(visible, rows, keys)
    assert visible.pairs(rows, keys) == seen.sum()
    assert not (visible.is_empty and seen.any())


@given(visibles)
def test_lists_and_back(visible):
    numbers = visible.to_list()
    assert all(isinstance(x, int) for x in numbers)
    assert Visible.of_list(numbers) == visible


@pytest.mark.parametrize(
    "numbers", [[1], [2, 1], [2, 1, 1, 0], [2, 1, 1, 2, 1, 1], [3, 1, 1], [-1, 1, 1]]
)
def test_lists_of_another_form(numbers):
    with pytest.raises(ValueError, match="make the list by Visible"):
        Visible.of_list(numbers)


def test_the_text_for_a_wrong_list():
    with pytest.raises(ValueError) as caught:
        Visible.of_list([2, 1, 1, 0, 4, 8])
    assert_expected_inline(
        fill(str(caught.value), 80),
        """\
visible: got [2, 1, 1, 0, 4, 8]; needed the number and the two integers of each
limit, of rows 0, keys 1 and upper 2 in this order: make the list by
Visible.to_list""",
    )


@given(lengths, lengths, st.integers(1, 6), st.booleans(), st.data())
def test_a_chunk_against_positions(q_len, kv_len, ranks, causal, data):
    """Contiguous chunks, uneven and empty ones too, padded to the largest."""
    queries, keys = Chunks(q_len, ranks), Chunks(kv_len, ranks)
    rank, source = (data.draw(st.integers(0, ranks - 1)) for _ in range(2))
    q_start, q_count = queries.start(rank), queries.count(rank)
    k_start, k_count = keys.start(source), keys.count(source)
    size = data.draw(st.sampled_from([k_count, keys.size, keys.size + 3]))
    visible = visible_chunk(q_start, q_count, k_start, k_count, size, causal)
    expected = mask(
        q_count,
        size,
        lambda i, j: j < k_count and (not causal or q_start + i >= k_start + j),
    )
    assert torch.equal(mask_of(visible, q_count, size), expected)
    assert torch.equal(
        painted(visible.blocks(q_count, size), q_count, size), expected.long()
    )
    # What is not limited has no limit, and what nobody sees is said to be nothing.
    assert visible.is_empty == (not expected.any())
    if not visible.is_empty:
        assert (visible.keys is None) == (size == k_count)
        assert (visible.upper is None) == bool(expected[:, :k_count].all())


@given(st.none() | st.integers(-3, 12), st.none() | sizes, st.data())
def test_one_vector_says_what_symbols_say(first, stop, data):
    """Of limits as causal attention has them: from a row on, up to a key."""
    row_count, key_count = data.draw(sizes), data.draw(sizes)
    upper = data.draw(st.none() | limits)
    visible = Visible(
        None if first is None else (first, row_count + data.draw(sizes)),
        None if stop is None else (0, stop),
        None if upper is None else (upper, upper),
    )
    vector = upper_of_rows(visible, row_count, key_count, torch.device("cpu"))
    assert vector.dtype == torch.int32
    assert (vector.diff() >= 0).all()  # as the templates need it
    found = torch.arange(key_count) < vector[:, None]
    assert torch.equal(found, mask_of(visible, row_count, key_count))


@pytest.mark.parametrize(
    "visible",
    [
        Visible(rows=(0, 4)),  # of five
        Visible(keys=(1, 5)),
        Visible(upper=(1, 0)),
    ],
)
def test_what_one_vector_cannot_say_is_refused(visible):
    with pytest.raises(ValueError, match="one upper limit for each row"):
        upper_of_rows(visible, 5, 5, torch.device("cpu"))


small = st.integers(0, 12)


def dense_mask(q_start, q_count, k_start, k_count, causal):
    """What the queries see of the keys, from the definition."""
    rows = torch.arange(q_start, q_start + q_count)[:, None]
    keys = torch.arange(k_start, k_start + k_count)
    return keys <= rows if causal else torch.ones(q_count, k_count, dtype=torch.bool)


@given(small, small, small, small, st.booleans())
def test_blocks_of_a_chunk_cover_each_visible_pair_once(
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
    blocks = visible_blocks(q_start, q_count, k_start, k_count, causal)
    squares = tuple(part for block in blocks for part in square(block))
    expected = painted(blocks, q_count, k_count)
    assert torch.equal(painted(squares, q_count, k_count), expected)
    assert all(b.rows == b.keys for b in squares if b.triangular)
    assert all(b.rows > 0 and b.keys > 0 for b in squares)
    assert live_pairs(squares) == live_pairs(blocks)


def painted(blocks, rows, keys):
    """How many blocks compute each pair, int64 [rows, keys]."""
    counts = torch.zeros(rows, keys, dtype=torch.int64)
    for b in blocks:
        part = counts[b.row :: b.step, b.key :: b.step][: b.rows, : b.keys]
        ones = torch.ones(b.rows, b.keys, dtype=torch.int64)
        part += ones.tril() if b.triangular else ones
    return counts
