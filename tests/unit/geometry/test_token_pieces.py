"""Lists of pieces are what torch computes, and moves bring every token to its place."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpcompile.geometry import token_pieces
from cpcompile.geometry.layout import BatchRows, Layout, TokenLayout
from cpcompile.geometry.token_pieces import FILL, Joined, move_of

CPU = torch.device("cpu")
layouts = st.sampled_from([*Layout, "rows"])
number = st.none() | st.integers(-40, 40)
slices = st.builds(slice, number, number, st.none() | st.integers(1, 5))
fill = -7  # no token of a sequence


def dealt(layout: Layout | str | None, tokens: int, ranks: int):
    """A layout; that of "rows" has two sequences where the number is even."""
    if not isinstance(layout, str):
        return layout and TokenLayout.of(layout, tokens, ranks)
    batch = 2 - tokens % 2
    return BatchRows(TokenLayout.of(Layout.ZIGZAG, tokens // batch, ranks), batch)


def moved(joined: Joined, whole: Sequence[Tensor], given, ranks: int) -> Tensor:
    """What the ranks have in the end, from what each has of the sources.

    given: layouts of the sources, None for what every rank has, and of the result.
    """
    *of_sources, last = given
    each = zip(of_sources, map(len, whole), strict=True)
    sources = tuple(dealt(layout, n, ranks) for layout, n in each)
    result = dealt(last, joined.length, ranks)
    order = result.permutation()
    moves = [
        move_of(sources, tuple(joined.pieces), result, rank, CPU)
        for rank in range(ranks)
    ]
    buffers, results = [], []
    for rank, move in enumerate(moves):
        parts = [
            x
            if tokens is None
            else x[tokens.permutation()].split([*map(tokens.count, range(ranks))])[rank]
            for x, tokens in zip(whole, sources, strict=True)
        ]
        own = torch.full((result.count(rank),), -1)
        own[move.filled] = fill
        sent = torch.full((sum(move.sent),), -1)
        for x, kept, leaving in zip(parts, move.kept, move.leaving, strict=True):
            kept.copy(x, own, 0)
            leaving.copy(x, sent, 0)
        buffers.append(sent.split(move.sent))
        results.append(own)
    for rank, move in enumerate(moves):
        came = [buffers[other][rank] for other in range(ranks)]
        assert [len(x) for x in came] == move.received
        move.arriving.copy(torch.cat(came), results[rank], 0)
    travels = any(len(x) for sent in buffers for x in sent)
    assert {move.is_local for move in moves} == {not travels}
    return torch.cat(results)[order.argsort()]


@settings(deadline=None)
@given(st.integers(0, 40), slices, layouts, layouts, st.integers(1, 6))
def test_a_slice(length, cut, before, after, ranks):
    x = torch.arange(length)
    joined = token_pieces.sliced(length, cut.start, cut.stop, cut.step)
    assert torch.equal(moved(joined, [x], [before, after], ranks), x[cut])


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(-50, 50), layouts, st.integers(1, 6))
def test_a_roll_and_a_flip(length, shift, layout, ranks):
    x, given_ = torch.arange(length), [layout, layout]
    rolled = moved(token_pieces.rolled(length, shift), [x], given_, ranks)
    assert torch.equal(rolled, x.roll(shift))
    flipped = moved(token_pieces.flipped(length), [x], given_, ranks)
    assert torch.equal(flipped, x.flip(0))


@settings(deadline=None)
@given(
    st.integers(8, 30),
    st.integers(-3, 6),
    st.integers(-3, 6),
    st.sampled_from(["constant", "reflect", "replicate", "circular"]),
    layouts,
    st.integers(1, 5),
)
def test_padding(length, before, after, mode, layout, ranks):
    x = torch.arange(length)
    if mode != "constant":  # torch does not cut then in all modes
        before, after = abs(before), abs(after)
    joined = token_pieces.padded(length, before, after, mode)
    value = fill if mode == "constant" else None
    padded = F.pad(x[None].double(), (before, after), mode, value)[0].long()
    assert torch.equal(moved(joined, [x], [layout, layout], ranks), padded)


@settings(deadline=None)
@given(
    st.integers(1, 30),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 12),
    layouts,
    st.integers(1, 5),
)
def test_windows(length, size, step, dilation, before, count, layout, ranks):
    joined = token_pieces.windowed(length, size, step, dilation, before, count)
    place = step * torch.arange(count)[:, None] - before
    place = (place + dilation * torch.arange(size)).flatten()
    wanted = place.where((place >= 0) & (place < length), torch.tensor(fill))
    found = moved(joined, [torch.arange(length)], [layout, layout], ranks)
    assert torch.equal(found, wanted)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.data(),
    layouts,
    st.integers(1, 5),
)
def test_a_joined_sequence(lengths, data, layout, ranks):
    whole = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    given_ = [data.draw(st.none() | st.just(layout)) for _ in lengths]
    joined = token_pieces.concatenated(lengths)
    found = moved(joined, whole, [*given_, layout], ranks)
    assert torch.equal(found, torch.cat(whole))


@settings(deadline=None)
@given(
    st.integers(1, 40),
    slices,
    layouts,
    st.none() | layouts,
    st.booleans(),
    st.integers(1, 5),
)
def test_an_assignment(length, cut, layout, of_part, by_number, ranks):
    x = torch.arange(length)
    wanted, part = x.clone(), 100 + torch.arange(len(x[cut]))
    bounds = (cut.start, cut.stop, cut.step)
    if by_number:
        wanted[cut] = fill
        joined = token_pieces.assigned(length, *bounds, FILL)
        found = moved(joined, [x], [layout, layout], ranks)
    else:
        wanted[cut] = part
        joined = token_pieces.assigned(length, *bounds, 1)
        found = moved(joined, [x, part], [layout, of_part, layout], ranks)
    assert torch.equal(found, wanted)


def test_few_tokens_travel():
    """A rank lends a token at each border of its parts, however long they are."""
    for layout, most in ((Layout.CONTIGUOUS, 1), (Layout.ZIGZAG, 3)):
        joined = token_pieces.sliced(4096, 1, None, 1)
        result = TokenLayout.of(layout, 4095, 8)
        for rank in range(8):
            sources = (TokenLayout.of(layout, 4096, 8),)
            move = move_of(sources, tuple(joined.pieces), result, rank, CPU)
            assert sum(move.sent) <= most and sum(move.received) <= most
