"""Which tokens of some sequences make another one, and which ranks have them.

    x[:, 1:]          [Piece(0, start=1, tokens=S - 1, at=0)]
    roll(x, 1, 1)     [Piece(0, S - 1, 1, at=0), Piece(0, 0, S - 1, at=1)]
    cat([x, y], 1)    [Piece(0, 0, S, at=0), Piece(1, 0, T, at=S)]
    y[:, ::2] = v     [Piece(0, 0, S, at=0), Piece(1, 0, S / 2, at=0, at_step=2)]

Each rank has its part of all of these sequences, in some layout. A token that is on the
same rank before and after is copied there; the others are sent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cpcompile.geometry.layout import BatchRows, TokenLayout

FILL = -1
"""The source of a piece that is a number."""
_RUNS = 16  # as many pieces are copied one by one; more by an index


class Piece(NamedTuple):
    """Tokens of one source, and where they go; later pieces replace earlier ones.

    source: number of the sequence, or FILL. start, step: of its first token, and of the
    next ones; a step may be 0 or negative. at, at_step: the places in the result.
    """

    source: int
    start: int
    tokens: int
    at: int
    step: int = 1
    at_step: int = 1


class Joined(NamedTuple):
    """A sequence that is made of others.

    length: its tokens.
    """

    pieces: list[Piece]
    length: int


def bounds(start: int | None, stop: int | None, length: int) -> tuple[int, int]:
    """Return where a slice begins and ends, as Python and torch read it."""

    def place(n: int | None, default: int) -> int:
        if n is None:
            return default
        return max(0, min(n + length if n < 0 else n, length))

    return place(start, 0), place(stop, length)


def sliced(
    length: int, start: int | None, stop: int | None, step: int | None
) -> Joined:
    """Return x[start:stop:step] of a sequence."""
    first, end = bounds(start, stop, length)
    step = step or 1
    count = max(0, -(-(end - first) // step))
    return Joined([Piece(0, first, count, 0, step)], count)


def rolled(length: int, shift: int) -> Joined:
    """Return torch.roll(x, shift) of a sequence."""
    shift = shift % length if length else 0
    head = Piece(0, length - shift, shift, 0)
    return Joined([head, Piece(0, 0, length - shift, shift)], length)


def flipped(length: int) -> Joined:
    """Return torch.flip of a sequence."""
    return Joined([Piece(0, length - 1, length, 0, -1)], length)


def padded(length: int, before: int, after: int, mode: str) -> Joined:
    """Return F.pad(x, (before, after), mode) of a sequence; less than 0 cuts it."""
    total = length + before + after
    first = max(0, -before)
    own = Piece(0, first, max(0, length - first + min(after, 0)), max(0, before))
    pieces = [Piece(FILL, 0, total, 0), own]
    left, right, end = max(0, before), max(0, after), max(0, before) + own.tokens
    if mode == "reflect":
        pieces += [Piece(0, left, left, 0, -1)]
        pieces += [Piece(0, length - 2, right, end, -1)]
    elif mode == "replicate":
        pieces += [Piece(0, 0, left, 0, 0), Piece(0, length - 1, right, end, 0)]
    elif mode == "circular":
        pieces += [Piece(0, length - left, left, 0), Piece(0, 0, right, end)]
    return Joined(pieces, total)


def windowed(
    length: int, size: int, step: int, dilation: int, before: int, count: int
) -> Joined:
    """Return `count` windows of a sequence side by side, [window, place in it].

    Window i has the tokens i * step - before + j * dilation for j < size; FILL stands
    where the sequence has none.
    """
    pieces = [Piece(FILL, 0, count * size, 0)]
    if dilation == 1 and count < size:  # few long ones
        for i in range(count):
            first = i * step - before
            start, stop = max(0, first), min(length, first + size)
            if stop > start:
                pieces.append(Piece(0, start, stop - start, i * size + start - first))
        return Joined(pieces, count * size)
    for j in range(size):
        first = j * dilation - before  # of window 0
        skipped = max(0, -(first // step))
        last = min(count, (length - 1 - first) // step + 1)
        if last > skipped:
            start, at = first + skipped * step, skipped * size + j
            pieces.append(Piece(0, start, last - skipped, at, step, size))
    return Joined(pieces, count * size)


def concatenated(lengths: Sequence[int]) -> Joined:
    """Return torch.cat of sequences."""
    pieces, at = [], 0
    for number, length in enumerate(lengths):
        pieces.append(Piece(number, 0, length, at))
        at += length
    return Joined(pieces, at)


def assigned(
    length: int, start: int | None, stop: int | None, step: int | None, part: int
) -> Joined:
    """Return x after x[start:stop:step] = y, where y is source `part`, or FILL."""
    (piece,), count = sliced(length, start, stop, step)
    written = Piece(part, 0, count, piece.start, 1, piece.step)
    return Joined([Piece(0, 0, length, 0), written], length)


@dataclass(frozen=True)
class Copies:
    """Copies from places of one dimension to places of another.

    runs: (from, to, count) of each, where they are few; else None. source, target:
    every single place, int64.
    """

    runs: tuple[tuple[int, int, int], ...] | None
    source: Tensor
    target: Tensor

    @classmethod
    def of(cls, source: Tensor, target: Tensor, device: torch.device) -> Copies:
        """Find the runs of copies from `source` to `target`."""
        breaks = (source.diff() != 1) | (target.diff() != 1)
        first = torch.cat(
            [torch.zeros(1, dtype=torch.int64), 1 + breaks.nonzero()[:, 0]]
        )
        runs: tuple[tuple[int, int, int], ...] | None = ()
        if len(first) > _RUNS:
            runs = None
        elif len(source):
            counts = torch.cat([first, torch.tensor([len(source)])]).diff()
            columns = (source[first], target[first], counts)
            runs = tuple(zip(*(x.tolist() for x in columns), strict=True))
        return cls(runs, source.to(device), target.to(device))

    def copy(self, x: Tensor, result: Tensor, dim: int) -> None:
        """Copy entries of x into the result."""
        if self.runs is None:
            result.index_copy_(dim, self.target, x.index_select(dim, self.source))
        for source, target, count in self.runs or ():
            result.narrow(dim, target, count).copy_(x.narrow(dim, source, count))

    def add_back(self, result: Tensor, x: Tensor, dim: int) -> None:
        """Add entries of the result to those of x that they are copies of."""
        if self.runs is None:
            part = result.index_select(dim, self.target).to(x.dtype)
            x.index_add_(dim, self.source, part)
        for source, target, count in self.runs or ():
            x.narrow(dim, source, count).add_(result.narrow(dim, target, count))


@dataclass(frozen=True)
class Move:
    """What one rank does to have its part of a joined sequence.

    kept: per source, copies of own tokens to the result. leaving: per source, copies of
    own tokens to a buffer, which has `sent` for each rank, one rank after the other.
    arriving: copies of received tokens to the result, `received` from each rank.
    filled: the places with a number. repeats: per source, whether some of its tokens
    are read more than once. is_local: whether no rank sends.
    """

    kept: tuple[Copies, ...]
    leaving: tuple[Copies, ...]
    arriving: Copies
    filled: Tensor
    sent: list[int]
    received: list[int]
    repeats: tuple[bool, ...]
    is_local: bool


@functools.lru_cache(maxsize=128)
def move_of(
    sources: tuple[TokenLayout | BatchRows | None, ...],
    pieces: tuple[Piece, ...],
    result: TokenLayout | BatchRows,
    rank: int,
    device: torch.device,
) -> Move:
    """Find out what a rank copies, sends and receives.

    Args:
        sources: the layout of each; None where every rank has all of it.
        pieces: what makes the result.
        result: the tokens of the result that each rank has in the end.
    """
    ranks, length = result.ranks, result.length
    source, place = torch.full((2, length), FILL)
    for piece in pieces:
        where = piece.at + piece.at_step * torch.arange(piece.tokens)
        source[where] = piece.source
        place[where] = piece.start + piece.step * torch.arange(piece.tokens)
    order = result.permutation()  # all that follows is in the order of the ranks
    source, place = source[order], place[order]
    counts = torch.tensor([result.count(each) for each in range(ranks)])
    reader = torch.arange(ranks).repeat_interleave(counts)
    target = torch.cat([torch.arange(int(n)) for n in counts])
    owner, local = reader.clone(), place.clone()
    repeats = []
    for number, layout in enumerate(sources):
        mine = source == number
        places = place[mine]
        repeats.append(bool(len(places.unique()) < len(places)))
        if layout is not None:
            owner[mine], local[mine] = layout.places(places)
    is_filled, moves = source == FILL, owner != reader
    own = (reader == rank) & ~moves & ~is_filled
    goes = (owner == rank) & moves
    comes = (reader == rank) & moves
    by_owner = owner[comes].argsort(stable=True)
    slots = torch.cumsum(goes, 0) - 1
    kept: list[Copies] = []
    leaving: list[Copies] = []
    for number in range(len(sources)):
        for chosen, to, copies in ((own, target, kept), (goes, slots, leaving)):
            mine = chosen & (source == number)
            copies.append(Copies.of(local[mine], to[mine], device))
    arriving = target[comes][by_owner]
    return Move(
        tuple(kept),
        tuple(leaving),
        Copies.of(torch.arange(len(arriving)), arriving, device),
        target[(reader == rank) & is_filled].to(device),
        reader[goes].bincount(minlength=ranks).tolist(),
        owner[comes].bincount(minlength=ranks).tolist(),
        tuple(repeats),
        not bool(moves.any()),
    )
