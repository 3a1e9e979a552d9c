"""Tiles of rows under a mask, and the blocks of scores that they compute.

Note [Blocks of a mask]
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

Rows that begin at the same key, where each ends one key after the row before it,
have a rectangle and a triangle, which is what kernels take as causal: no mask at all,
and as many rows at once as there are. That is what a causal document is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.key_ranges import Seen

WORTH_A_CALL_KEYS = 128  # of a middle without a mask; a call costs about a small tile


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens: where they are in the sequence, and where on their rank."""

    position: int
    place: int
    count: int

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.position + self.count

    def part(self, first: int, count: int) -> TokenSpan:
        """Return `count` of these tokens, from number `first` on."""
        return TokenSpan(self.position + first, self.place + first, count)


@dataclass(frozen=True)
class Tile:
    """The largest block with a mask: its rows, which cut all blocks, and its keys."""

    rows: int
    keys: int

    @classmethod
    def of(cls, copies: int, elements: int, rows: int = 256) -> Tile:
        """Choose a tile so that `copies` masks (or scores) have at most `elements`."""
        pairs = max(elements // max(copies, 1), 1)
        rows = min(rows, 1 << ((pairs.bit_length() - 1) // 2))  # at most square
        return cls(rows, pairs // rows)


def blocks_of_tiles(
    tiles: Iterable[tuple[TokenSpan, Seen]],
    numbers: Iterable[tuple[int, TokenSpan]],
    tile: Tile,
    cut_all: bool,
) -> list[Block]:
    """Return what tiles of rows compute of some runs of keys, given by number."""
    blocks = [
        block
        for number, run in numbers
        for piece, seen in (tiles if cut_all else _triangles(tiles, run))
        if seen.runs[number]
        for block in _blocks(piece, run, seen, tile, cut_all)
    ]
    return blocks if cut_all else _joined(blocks)


def _triangles(
    tiles: Iterable[tuple[TokenSpan, Seen]], run: TokenSpan
) -> list[tuple[TokenSpan, Seen]]:
    """Return the tiles, with the tiles of one triangle in this run joined to one."""
    pieces: list[tuple[TokenSpan, Seen]] = []
    for tile in tiles:
        joined = _one_triangle(*pieces[-1], *tile, run) if pieces else None
        if joined is None:
            pieces.append(tile)
        else:
            pieces[-1] = joined
    return pieces


def _blocks(
    piece: TokenSpan, run: TokenSpan, seen: Seen, tile: Tile, cut_all: bool
) -> Iterator[Block]:
    """Yield what a tile of rows computes of a run; Note [Blocks of a mask]."""
    start, stop = max(run.position, seen.start), min(run.stop, seen.stop)
    if not cut_all and _is_triangle(seen, run):
        corner = seen.middle[1] - 1
        if corner > start:
            place = run.place + start - run.position
            sides = (piece.place, seen.rows, place, corner - start)
            yield Block(*sides, position=start)
        place = run.place + corner - run.position
        sides = (piece.place, seen.rows, place, seen.rows)
        yield Block(*sides, triangular=True, position=corner)
        return
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
            sides = (piece.place, piece.count, place, count)
            yield Block(*sides, position=at, masked=masked)


def _is_triangle(seen: Seen, run: TokenSpan) -> bool:
    """Tell whether rows see a rectangle and a triangle that lies in this key run."""
    first, last = seen.middle
    one_start = seen.start == first and first < last
    inside = run.position < last and seen.stop <= run.stop
    return seen.rows > 1 and seen.sloped and one_start and inside


def _one_triangle(
    piece: TokenSpan, seen: Seen, next_piece: TokenSpan, next_seen: Seen, run: TokenSpan
) -> tuple[TokenSpan, Seen] | None:
    """Join two pieces to one if both are of one triangle; else return None."""
    follows = (
        _is_triangle(seen, run)
        and _is_triangle(next_seen, run)
        and next_piece.place == piece.place + piece.count
        and next_seen.start == seen.start
        and next_seen.middle[1] == seen.stop + 1
    )
    if not follows:
        return None
    rows = seen.rows + next_seen.rows
    runs = tuple(map(max, seen.runs, next_seen.runs))
    stop = next_seen.stop
    return piece.part(0, rows), replace(seen, rows=rows, stop=stop, runs=runs)


def _joined(blocks: list[Block]) -> list[Block]:
    """Join the blocks of adjacent tiles that see the same keys without a mask."""
    joined: list[Block] = []
    open_blocks: dict[tuple[int, int], int] = {}
    for block in blocks:
        at = open_blocks.get((block.key, block.keys))
        before = None if at is None else joined[at]
        if block.masked or block.triangular:
            joined.append(block)
        elif at is None or before is None or before.row + before.rows != block.row:
            open_blocks[block.key, block.keys] = len(joined)
            joined.append(block)
        else:
            joined[at] = replace(before, rows=before.rows + block.rows)
    return joined
