"""The blocks of scores that a rank computes under a mask, and who needs whose keys.

Blocks are those of Note [Blocks of a mask] in mask_tiles.py.

Note [One summary of the mask]
Every rank works out the same table from the same whole integers: which run of keys is
seen by which rows of which rank. That is a few operations on the device and one copy to
the host, for a whole call: `summarize` is the only place that waits for the device. A
mask of constants is summarized once, on the host, see mask_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cpcompile.geometry.blocks import Block, live_pairs
from cpcompile.geometry.key_ranges import (
    KeyRanges,
    Seen,
    read_table,
    seen_runs,
    table_size,
)
from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.geometry.mask_tiles import Tile, TokenSpan, blocks_of_tiles


def spans(layout: Layout, runs: Runs, rank: int) -> tuple[TokenSpan, ...]:
    """Return the tokens of a rank, contiguous or zigzag, as non-empty spans."""
    if layout is Layout.CONTIGUOUS or runs.ranks == 1:
        own = [
            TokenSpan(runs.start(rank, i), runs.offset(rank, i), runs.run(rank, i))
            for i in range(runs.pieces)
        ]
    else:
        tokens = TokenLayout(layout, runs.length, runs.ranks, runs.padded)
        head, count = tokens.head(rank), tokens.count(rank)
        own = [
            TokenSpan(tokens.first(rank), 0, head),
            TokenSpan(tokens.tail(rank), head, count - head),
        ]
    return tuple(span for span in own if span.count)


class Cut(NamedTuple):
    """How scores are cut into blocks: who has which tokens, and how large blocks are.

    rows, keys: the spans of each rank and source, which together are the sequences.
    rank: the one whose blocks these are.
    tile: sizes of blocks; blocks without a mask have more keys unless `cut_all`.
    """

    rows: Sequence[tuple[TokenSpan, ...]]
    keys: Sequence[tuple[TokenSpan, ...]]
    rank: int
    tile: Tile
    cut_all: bool = False

    def pieces(self) -> list[tuple[int, TokenSpan]]:
        """Return the pieces of rows with their ranks, in the order of the sequence.

        Runs of rows of this rank are cut into tiles.
        """
        pieces = [
            (owner, span.part(at, min(step, span.count - at)))
            for owner, held in enumerate(self.rows)
            for span in held
            for step in (self.tile.rows if owner == self.rank else span.count,)
            for at in range(0, span.count, step)
        ]
        return sorted(pieces, key=lambda x: x[1].position)

    def runs(self) -> list[tuple[int, TokenSpan]]:
        """Return the runs of keys with their sources, in the order of the sequence."""
        runs = [(source, x) for source, held in enumerate(self.keys) for x in held]
        return sorted(runs, key=lambda x: x[1].position)

    def summarize(self, ranges: KeyRanges) -> Tensor:
        """Make the table for MaskBlocks.of_table; only this waits for the device.

        ranges: of all rows of the sequence, in its order.
        """
        counts = [piece.count for _, piece in self.pieces()]
        return seen_runs(ranges, counts, [run.stop for _, run in self.runs()])

    @property
    def summary_size(self) -> int:
        """How many numbers `summarize` gives."""
        return table_size(len(self.pieces()), len(self.runs()))


@dataclass(frozen=True)
class MaskBlocks:
    """The blocks that one rank computes; see Note [Blocks of a mask] in mask_tiles.py.

    tiles: pieces of the rows of this rank, and what each sees of the runs.
    runs: by source, its runs of keys, each with its number among all runs.
    needed: by rank and source, whether any row of the rank sees any key of the source.
    has_holes: whether ranges alone do not say what is visible; then ids are compared.
    ordered: whether the ranges never decrease from one row to the next.
    """

    tiles: tuple[tuple[TokenSpan, Seen], ...]
    runs: tuple[tuple[tuple[int, TokenSpan], ...], ...]
    needed: tuple[tuple[bool, ...], ...]
    has_holes: bool
    ordered: bool
    tile: Tile
    cut_all: bool

    @classmethod
    def of(cls, ranges: KeyRanges, cut: Cut) -> MaskBlocks:
        """Find what the rank of `cut` computes; ranges: as Cut.summarize has them."""
        return cls.of_table(cut.summarize(ranges), cut)

    @classmethod
    def of_table(cls, table: Tensor, cut: Cut) -> MaskBlocks:
        """Do what `of` does, with what `summarize` makes in the place of the ranges."""
        pieces, ordered_runs = cut.pieces(), cut.runs()
        runs: list[list[tuple[int, TokenSpan]]] = [[] for _ in cut.keys]
        for number, (source, span) in enumerate(ordered_runs):
            runs[source].append((number, span))
        seen_by, has_holes, ordered = read_table(table, len(pieces), len(ordered_runs))
        needed = [[False] * len(cut.keys) for _ in cut.rows]
        tiles = []
        for (owner, piece), parts in zip(pieces, seen_by, strict=False):
            first = 0
            for seen in parts:
                for (source, _), any_row in zip(ordered_runs, seen.runs, strict=True):
                    needed[owner][source] |= any_row
                if owner == cut.rank:
                    tiles.append((piece.part(first, seen.rows), seen))
                first += seen.rows
        return cls(
            tuple(tiles),
            tuple(map(tuple, runs)),
            tuple(map(tuple, needed)),
            has_holes,
            ordered,
            cut.tile,
            cut.cut_all,
        )

    def sees(self, source: int) -> bool:
        """Tell whether any row of this rank sees any key of the source."""
        return any(
            seen.runs[number]
            for _, seen in self.tiles
            for number, _ in self.runs[source]
        )

    def of_source(self, source: int) -> list[Block]:
        """Return the blocks that are computed of the keys of a source."""
        return blocks_of_tiles(self.tiles, self.runs[source], self.tile, self.cut_all)

    @property
    def pairs(self) -> int:
        """Number of (row, key) pairs that this rank computes, masked ones included."""
        return sum(
            live_pairs(self.of_source(source)) for source in range(len(self.runs))
        )
