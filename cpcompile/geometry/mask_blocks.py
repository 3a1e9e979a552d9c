"""Which parts of the scores a rank computes under a mask, and who needs whose keys.

Note [Parts of a mask]
The rows of a rank are cut into tiles. What a tile sees of a run of consecutive keys is
found from the ranges of its rows, see key_ranges.py:

        keys ->
    rows  . . # # # # # # . .      .  no row sees it: not computed
     |    . . . # # # # # # .      #  the middle, which all rows see: without a mask
     v    . . . . # # # # # #      the rest from the first key to the last: masked
              |---|   |---|
              masked  masked

So nothing of rows times keys is held, and a window costs its own width. The middle is
computed for itself if it is large enough to be worth a call.

Note [One look at the mask]
Every rank works out the same table from the same whole integers: which run of keys is
seen by which rows of which rank. That is a few operations on the device and one copy to
the host, for a whole call: `look` is the only place that waits for the device. A
mask of constants is looked at once, on the host, see known_masks.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cpcompile.geometry.key_ranges import (
    KeyRanges,
    Seen,
    read_table,
    seen_runs,
    table_size,
)
from cpcompile.geometry.layout import Runs, TokenLayout
from cpcompile.plans import Layout

WORTH_A_CALL_KEYS = 128  # of a middle without a mask; a call costs about a small tile


@dataclass(frozen=True)
class Span:
    """Consecutive tokens: where they are in the sequence, and where on their rank."""

    position: int
    place: int
    count: int

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.position + self.count


def spans(layout: Layout, runs: Runs, rank: int) -> tuple[Span, ...]:
    """The tokens of a rank in the contiguous or the zigzag layout; none is empty."""
    if layout is Layout.CONTIGUOUS:
        found = [
            Span(runs.start(rank, i), runs.offset(rank, i), runs.run(rank, i))
            for i in range(runs.pieces)
        ]
    else:
        tokens = TokenLayout(layout, runs.length, runs.ranks, runs.padded)
        head, count = tokens.head(rank), tokens.count(rank)
        found = [
            Span(tokens.first(rank), 0, head),
            Span(tokens.tail(rank), head, count - head),
        ]
    return tuple(span for span in found if span.count)


@dataclass(frozen=True)
class Part:
    """Local rows [row, +rows) meet keys [key, +keys) of a source.

    position: of the first key in its sequence. masked: whether the ranges and ids hide
    some of these keys from some of these rows, or may do so.
    """

    row: int
    rows: int
    key: int
    keys: int
    position: int
    masked: bool


@dataclass(frozen=True)
class Tile:
    """The largest part with a mask: its rows, which cut all parts, and its keys."""

    rows: int
    keys: int

    @classmethod
    def of(cls, copies: int, elements: int, rows: int = 256) -> Tile:
        """Of `copies` masks (or scores) at once with so many elements together."""
        each = max(elements // max(copies, 1), 1)
        rows = min(rows, 1 << ((each.bit_length() - 1) // 2))  # at most square
        return cls(rows, each // rows)


@dataclass(frozen=True)
class MaskBlocks:
    """What one rank computes; see Note [Parts of a mask].

    tiles: of the rows of this rank, and what each sees of the runs of keys.
    runs: by source, its runs with their numbers among those of all.
    needed: by rank and source, whether any row of the rank sees any key of the source.
    has_holes: whether ranges alone do not say what is visible; then ids are compared.
    ordered: whether the ranges never decrease from one row to the next.
    """

    tiles: tuple[tuple[Span, Seen], ...]
    runs: tuple[tuple[tuple[int, Span], ...], ...]
    needed: tuple[tuple[bool, ...], ...]
    has_holes: bool
    ordered: bool
    tile: Tile
    cut_all: bool

    @classmethod
    def of(
        cls,
        ranges: KeyRanges,
        rows: Sequence[tuple[Span, ...]],
        keys: Sequence[tuple[Span, ...]],
        rank: int,
        tile: Tile,
        cut_all: bool,
    ) -> MaskBlocks:
        """For `rank`, where ranks have these rows, and sources these keys.

        ranges: of all rows of the sequence, in its order.
        rows, keys: the spans of each rank and source, which together are the sequences.
        tile: sizes of parts; parts without a mask have more keys unless `cut_all`.
        """
        table = look(ranges, rows, keys, rank, tile)
        return cls.of_table(table, rows, keys, rank, tile, cut_all)

    @classmethod
    def of_table(
        cls,
        table: Tensor,
        rows: Sequence[tuple[Span, ...]],
        keys: Sequence[tuple[Span, ...]],
        rank: int,
        tile: Tile,
        cut_all: bool,
    ) -> MaskBlocks:
        """As `of`, with the answer of `look` in the place of the ranges."""
        groups, ordered_runs = _groups(rows, rank, tile), _ordered(keys)
        runs: list[list[tuple[int, Span]]] = [[] for _ in keys]
        for number, (source, span) in enumerate(ordered_runs):
            runs[source].append((number, span))
        seen_by, has_holes, ordered = read_table(table, len(groups), len(ordered_runs))
        needed = [[False] * len(keys) for _ in rows]
        tiles = []
        for (owner, piece), seen in zip(groups, seen_by, strict=False):
            for (source, _), any_row in zip(ordered_runs, seen.runs, strict=True):
                needed[owner][source] |= any_row
            if owner == rank:
                tiles.append((piece, seen))
        return cls(
            tuple(tiles),
            tuple(map(tuple, runs)),
            tuple(map(tuple, needed)),
            has_holes,
            ordered,
            tile,
            cut_all,
        )

    def sees(self, source: int) -> bool:
        """Whether any row of this rank sees any key of the source."""
        return any(
            seen.runs[number]
            for _, seen in self.tiles
            for number, _ in self.runs[source]
        )

    def parts(self, source: int) -> list[Part]:
        """What is computed of the keys of a source."""
        found = [
            part
            for piece, seen in self.tiles
            for number, run in self.runs[source]
            if seen.runs[number]
            for part in _parts(piece, run, seen, self.tile, self.cut_all)
        ]
        return found if self.cut_all else _joined(found)

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that this rank computes, masked ones included."""
        return sum(
            part.rows * part.keys
            for source in range(len(self.runs))
            for part in self.parts(source)
        )


def look(
    ranges: KeyRanges,
    rows: Sequence[tuple[Span, ...]],
    keys: Sequence[tuple[Span, ...]],
    rank: int,
    tile: Tile,
) -> Tensor:
    """What MaskBlocks.of_table reads: the one place that waits for the device."""
    groups, runs = _groups(rows, rank, tile), _ordered(keys)
    counts = [piece.count for _, piece in groups]
    return seen_runs(ranges, counts, [run.stop for _, run in runs])


def size_of_look(
    rows: Sequence[tuple[Span, ...]],
    keys: Sequence[tuple[Span, ...]],
    rank: int,
    tile: Tile,
) -> int:
    """How many numbers `look` gives."""
    return table_size(len(_groups(rows, rank, tile)), len(_ordered(keys)))


def _groups(
    rows: Sequence[tuple[Span, ...]], rank: int, tile: Tile
) -> list[tuple[int, Span]]:
    """The pieces of rows with their ranks, in the order of the sequence."""
    return sorted(_pieces(rows, rank, tile.rows), key=lambda x: x[1].position)


def _ordered(keys: Sequence[tuple[Span, ...]]) -> list[tuple[int, Span]]:
    """The runs of keys with their sources, in the order of the sequence."""
    return sorted(
        ((source, span) for source, each in enumerate(keys) for span in each),
        key=lambda x: x[1].position,
    )


def _pieces(
    rows: Sequence[tuple[Span, ...]], rank: int, size: int
) -> Iterator[tuple[int, Span]]:
    """Runs of rows with their rank; those of `rank` itself cut into tiles."""
    for owner, each in enumerate(rows):
        for span in each:
            step = size if owner == rank else span.count
            for at in range(0, span.count, step):
                count = min(step, span.count - at)
                yield owner, Span(span.position + at, span.place + at, count)


def _parts(
    piece: Span, run: Span, seen: Seen, tile: Tile, cut_all: bool
) -> Iterator[Part]:
    """What a tile of rows computes of a run of keys; Note [Parts of a mask]."""
    start, stop = max(run.position, seen.start), min(run.stop, seen.stop)
    middle, end = max(start, seen.middle[0]), min(stop, seen.middle[1])
    if end - middle < WORTH_A_CALL_KEYS and (middle, end) != (start, stop):
        middle = end = stop
    for low, high, masked in (
        (start, middle, True),
        (middle, end, False),
        (end, stop, True),
    ):
        step = tile.keys if masked or cut_all else max(high - low, 1)
        for at in range(low, high, step):
            place = run.place + at - run.position
            count = min(step, high - at)
            yield Part(piece.place, piece.count, place, count, at, masked)


def _joined(parts: list[Part]) -> list[Part]:
    """The same with one part where adjacent tiles see the same keys without a mask."""
    found: list[Part] = []
    open_parts: dict[tuple[int, int], int] = {}
    for part in parts:
        at = open_parts.get((part.key, part.keys))
        before = None if at is None else found[at]
        if part.masked:
            found.append(part)
        elif at is None or before is None or before.row + before.rows != part.row:
            open_parts[part.key, part.keys] = len(found)
            found.append(part)
        else:
            found[at] = replace(before, rows=before.rows + part.rows)
    return found
