"""Describe the values of a function that works on its tokens chunk by chunk.

Note [Chunks of tokens]
    for i in range(0, 4096, 1024):                     x: [4096, C], 2 ranks
        d[i : i + 1024] = f(x[i : i + 1024])
A rank has 2,048 of the rows. If every chunk is treated by the same calls, it does not
matter which rows are in which chunk: the rank runs the same program on its own rows,
as if these were the first ones, and leaves out the chunks for which it has none. So a
value is known by pieces: rows `start` to `stop` of it were made by the calls `made`.
The program may be shared out if all pieces of every result are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

Lower = Callable[[Any], fx.Node]
"""A function that writes a value into the `LocalProgram` that it is given."""


@dataclass(frozen=True)
class Piece:
    """Rows of a value that the same calls made, numbered as in the whole sequence.

    made: equal numbers mean that the same calls made them, of the same operands.
    """

    start: int
    stop: int
    made: int


@dataclass(frozen=True, eq=False)
class ChunkRows:
    """A value with a row per token, for tokens that follow one another."""

    dim: int
    pieces: tuple[Piece, ...]
    lower: Lower

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class ChunkSum:
    """A sum over tokens; without pieces it is zero."""

    pieces: tuple[Piece, ...]
    lower: Lower


@dataclass(frozen=True, eq=False)
class Whole:
    """A value that every rank has."""

    lower: Lower


Value = ChunkRows | ChunkSum | Whole


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Return the pieces in order, neighbours that are made alike as one."""
    result: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: p.start):
        last = result[-1] if result else None
        if last and last.stop == piece.start and last.made == piece.made:
            result[-1] = Piece(last.start, piece.stop, piece.made)
        elif piece.start < piece.stop:
            result.append(piece)
    return tuple(result)


def refined(
    values: Sequence[Sequence[Piece]],
) -> list[tuple[int, int, list[int | None]]]:
    """Cut several values into common ranges of rows: (start, stop, made).

    made: the number of what made the range in each value; None where it has no rows.
    """
    ends = sorted(
        {end for pieces in values for p in pieces for end in (p.start, p.stop)}
    )
    ranges = []
    for start, stop in itertools.pairwise(ends):
        makers = [
            next((p.made for p in pieces if p.start <= start and stop <= p.stop), None)
            for pieces in values
        ]
        if any(x is not None for x in makers):
            ranges.append((start, stop, makers))
    return ranges


def pieces_between(pieces: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Return the pieces of rows `start` to `stop`, cut at both ends."""
    parts = (Piece(max(p.start, start), min(p.stop, stop), p.made) for p in pieces)
    return joined([p for p in parts if p.start < p.stop])
