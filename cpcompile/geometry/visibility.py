"""The keys of a chunk that each query row sees, as a few integers.

Within a chunk the keys of every layout lie in the order of their positions, so what a
row sees is one range of keys, and a causal limit on it moves with the row:

    layout                      what row i of rank r sees of the chunk of rank s
    contiguous                  s < r: all    s = r: keys < i + 1    s > r: none
    contiguous, other offsets   keys < i + offset
    striped (round robin)       keys < i + 1 if s <= r, else keys < i
    fold (pairs r, 2N - 1 - r)  keys < i + upper[i % 2]
    head-tail zigzag            s = r: keys < i + 1    s < r: the first half of the keys
                                s > r: all, but only the second half of the rows

Where the integers are symbols, one int32 vector says the same, an entry per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpcompile.geometry.blocks import Block, live_pairs, visible_blocks
from cpcompile.geometry.layout import Layout, Runs, TokenLayout

if TYPE_CHECKING:
    from torch import Tensor, device

Pair = tuple[int, int]


@dataclass(frozen=True)
class Visible:
    """Limits on rows and keys: row i sees key j exactly if all of these hold.

    rows: rows[0] <= i < rows[1], and
    keys: keys[0] <= j < keys[1], and
    upper: j < i + upper[i % 2].

    None is no such limit. Rows outside of `rows` see nothing.
    """

    rows: Pair | None = None
    keys: Pair | None = None
    upper: Pair | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether no row sees any key, whatever the sizes.

        For limits that are symbols it tells what holds for all lengths, without a
        guard: guards have to be the same on every rank.
        """
        key_ranges = (x for x in (self.rows, self.keys) if x is not None)
        return any(_is_at_least(start, stop) for start, stop in key_ranges)

    def to_list(self) -> list[int]:
        """Return the integers that operators take: for each limit its number and pair.

        Numbers are those of the fields in their order, from 0. [2, 1, 1] is a causal
        limit, upper=(1, 1), and [] is no limit.
        """
        pairs = (self.rows, self.keys, self.upper)
        return [
            n
            for number, pair in enumerate(pairs)
            if pair is not None
            for n in (number, *pair)
        ]

    @classmethod
    def of_list(cls, numbers: Sequence[int]) -> Visible:
        """Undo `to_list`; raise ValueError for integers that it does not make."""
        fields = list(numbers[::3])
        if len(numbers) % 3 or fields != sorted({*fields} & {0, 1, 2}):
            raise ValueError(
                f"visible: got {list(numbers)}; needed the number and the two integers "
                "of each limit, of rows 0, keys 1 and upper 2 in this order: make the "
                "list by Visible.to_list"
            )
        pairs: list[Pair | None] = [None] * 3
        for number, first, second in zip(
            fields, numbers[1::3], numbers[2::3], strict=True
        ):
            pairs[number] = (first, second)
        return cls(*pairs)

    def pairs(self, row_count: int, key_count: int) -> int:
        """Count the (query, key) pairs that are computed."""
        return live_pairs(self.blocks(row_count, key_count))

    def blocks(self, row_count: int, key_count: int) -> tuple[Block, ...]:
        """Return blocks that cover exactly what is seen.

        Where `upper` differs for even and odd rows, blocks have every second row and
        every second key: row 2 a + p sees key 2 b + s up to some b - a.
        """
        rows = _clipped(self.rows, row_count)
        keys = _clipped(self.keys, key_count)
        if self.upper is None:
            return _blocks(rows, keys, None)
        if self.upper[0] == self.upper[1]:
            return _blocks(rows, keys, self.upper[0])
        return tuple(
            block
            for parity, upper in enumerate(self.upper)
            for every_second in (keys[::2], keys[1::2])
            for block in _blocks(
                rows[(parity - rows.start) % 2 :: 2], every_second, upper
            )
        )


ALL = Visible()
NOTHING = Visible(rows=(0, 0))


def visible_chunk(
    q_start: int, q_count: int, k_start: int, k_count: int, k_size: int, causal: bool
) -> Visible:
    """Return what queries at [q_start, +q_count) see of keys at [k_start, +k_count).

    The chunk of keys is padded to `k_size` tokens. A causal query at position p sees
    the keys at positions <= p.
    """
    offset = q_start - k_start + 1  # row i sees keys < i + offset
    if not q_count or not k_count or (causal and offset + q_count - 1 <= 0):
        return NOTHING
    cut = causal and offset < k_count
    return Visible(
        keys=None if k_count == k_size else (0, k_count),
        upper=(offset, offset) if cut else None,
    )


def visible_run(
    queries: Runs, rank: int, piece: int, keys: Runs, source: int
) -> tuple[Visible, ...]:
    """Return what a run of causal queries sees of all keys of rank `source`.

    It sees the keys before a run of the same positions, and the triangle in that run.
    This is one Visible, if runs of queries and of keys have one size. Else there is one
    for each run of keys, and together they are what is seen.
    """
    q_start, q_count = queries.start(rank, piece), queries.run(rank, piece)
    places = [
        (keys.offset(source, each), keys.start(source, each), keys.run(source, each))
        for each in range(keys.pieces)
    ]
    if queries.size != keys.size and keys.pieces > 1:
        return tuple(
            _within(offset, visible_chunk(q_start, q_count, start, count, -1, True))
            for offset, start, count in places
        )
    seen = [place for place in places if place[1] < q_start + q_count and place[2]]
    if not q_count or not seen:
        return (NOTHING,)
    offset, start, count = seen[-1]
    # The keys before the last run that is seen are seen by every row.
    size = keys.padded - offset
    visible = visible_chunk(q_start, q_count, start, count, size, True)
    stop = None if visible.keys is None else (0, offset + visible.keys[1])
    return (Visible(keys=stop, upper=_moved(visible.upper, offset)),)


def visible_tokens(tokens: TokenLayout, rank: int, source: int) -> Visible:
    """Return what causal queries of `rank` see of the keys of `source`, in one layout.

    Queries and keys are the same tokens; the keys are padded to `tokens.size`.
    """
    rows, count = tokens.count(rank), tokens.count(source)
    real = None if count == tokens.size else (0, count)
    if not rows or not count:
        return NOTHING
    if tokens.layout is Layout.CONTIGUOUS:
        start = tokens.start(source)
        return visible_chunk(tokens.start(rank), rows, start, count, tokens.size, True)
    if rank == source:
        return Visible(keys=real, upper=(1, 1))
    before = source < rank
    if tokens.layout is Layout.ZIGZAG:
        if before:  # all rows see the first of its two runs
            return Visible(keys=(0, tokens.head(source)))
        return Visible(rows=(tokens.head(rank), rows), keys=real)
    # Row i sees the rounds before i, and its own if that came to the source first.
    even = 1 if before else 0
    odd = 1 - even if tokens.layout is Layout.FOLD else even
    return Visible(keys=real, upper=(even, odd))


def upper_of_rows(
    visible: Visible, row_count: int, key_count: int, device: device
) -> Tensor:
    """Return the upper limit of each row, int32 [row_count]: it sees the keys below.

    Limits may be symbols.

    Raises: ValueError for what one such vector, which never decreases, cannot say: a
    limit that differs for even and odd rows, a first key, or rows that end before the
    last.
    """
    import torch  # slow; plans are made without it

    first, end = visible.rows or (0, row_count)
    start, stop = visible.keys or (0, key_count)
    even, odd = visible.upper or (key_count, key_count)
    whole = _is_at_least(end, row_count) and _is_at_least(0, start)
    if not whole or not (_is_at_least(even, odd) and _is_at_least(odd, even)):
        raise ValueError(f"got {visible}; needed one upper limit for each row, rising")
    row = torch.arange(row_count, dtype=torch.int32, device=device)
    upper = torch.full_like(row, stop)
    if visible.upper is not None:
        upper = torch.minimum(upper, (row + even).clamp(min=0))
    return upper if visible.rows is None else upper * (row >= first)


def _blocks(rows: range, keys: range, upper: int | None) -> tuple[Block, ...]:
    """Return blocks of rows i that see the keys j < i + upper; of one step, 1 or 2."""
    step, causal = rows.step, upper is not None
    # The a-th row sees the b-th key if b <= a + offset.
    offset = (rows.start + (upper or 0) - 1 - keys.start) // step
    return tuple(
        Block(
            rows.start + b.row * step,
            b.rows,
            keys.start + b.key * step,
            b.keys,
            b.triangular,
            step,
        )
        for b in visible_blocks(offset, len(rows), 0, len(keys), causal)
    )


def _is_at_least(n: int, m: int) -> bool:
    if isinstance(n, int) and isinstance(m, int):
        return n >= m
    # Needs torch, which those that only plan do not import.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(n >= m)


def _clipped(key_ranges: Pair | None, count: int) -> range:
    start, stop = key_ranges or (0, count)
    return range(max(start, 0), min(stop, count))


def _within(offset: int, visible: Visible) -> Visible:
    """Move a Visible of limited keys, or of no rows, to keys that begin at `offset`."""
    return Visible(
        visible.rows, _moved(visible.keys, offset), _moved(visible.upper, offset)
    )


def _moved(pair: Pair | None, offset: int) -> Pair | None:
    return None if pair is None else (pair[0] + offset, pair[1] + offset)
