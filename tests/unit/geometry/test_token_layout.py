"""Every layout, up to 64 tokens and 8 ranks, against positions and a dense mask."""

from fractions import Fraction

import pytest
import torch

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.visibility import visible_tokens
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


def work(tokens):
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
    """A tensor in a layout is the permuted one, cut as torch.chunk cuts it."""
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


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", Layout)
def test_what_a_rank_sees_of_another(layout, ranks):
    """Neither more nor less, and nothing of the padding."""
    for tokens in token_layouts(layout, ranks, start=1):
        expected = visible_by_position(tokens)
        assert torch.equal(visible_by_limits(tokens), expected), tokens
        by_source = torch.tensor(work(tokens))
        steps = torch.arange(ranks)
        sources = (steps.unsqueeze(1) - steps) % ranks
        counted = expected.sum((2, 3)).gather(1, sources)
        assert torch.equal(by_source, counted), tokens
        assert by_source.sum() == tokens.length * (tokens.length + 1) // 2


def even(layout, ranks):
    """Of how many tokens every rank has equally many: there are no ragged parts."""
    return 2 * ranks if layout is Layout.ZIGZAG else ranks


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", Layout)
def test_the_definition_of_a_layout(layout, ranks):
    for tokens in token_layouts(layout, ranks, even(layout, ranks)):
        assert positions(tokens) == defined(tokens.length, ranks, layout)
        if layout is Layout.ZIGZAG:
            assert {tokens.head(rank) for rank in range(ranks)} == {tokens.size // 2}


RAGGED = {
    Layout.CONTIGUOUS: [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]],
    Layout.ZIGZAG: [[0, 1, 9], [2, 7, 8], [3, 4, 6], [5]],
    Layout.STRIPED: [[0, 4, 7], [1, 5, 8], [2, 6, 9], [3]],
    Layout.FOLD: [[0, 6, 7], [1, 5, 8], [2, 4, 9], [3]],
}


@pytest.mark.parametrize("layout", Layout)
def test_ten_tokens_on_four_ranks(layout):
    assert positions(TokenLayout.of(layout, 10, 4)) == RAGGED[layout]


def imbalance(tokens, layout):
    """The most work of a rank over the least in a step, for `size` tokens of a rank.

    Striped has a row more or less of each triangle: c (c + 1) / 2 or c (c - 1) / 2
    pairs; fold is balanced but for a token where c is odd.
    """
    c = tokens.size
    if layout is Layout.STRIPED:
        return Fraction(c + 1, c - 1)
    return Fraction(c**2 + 1, c**2 - 1) if layout is Layout.FOLD and c % 2 else 1


@pytest.mark.parametrize("ranks", ALL_RANKS)
@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD])
def test_ranks_are_balanced_in_every_step(layout, ranks):
    for tokens in token_layouts(layout, ranks, even(layout, ranks), start=2 * ranks):
        of_steps = zip(*work(tokens), strict=True)
        worst = max(Fraction(max(x), min(x)) for x in of_steps)
        assert worst == (imbalance(tokens, layout) if ranks > 1 else 1), tokens


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
