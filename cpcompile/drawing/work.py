"""How many (query, key) pairs each rank computes in each step of a ring, exactly.

A rank holds runs of tokens at equal distances (`held`); in step t rank r meets the keys
of rank (r - t) mod N. Pairs of two such runs have a closed form, so that the table of a
thousand ranks is quick.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpcompile.plans import Layout

Table = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """`count` tokens at positions start, start + stride, ..."""

    start: int
    stride: int
    count: int


def held(layout: Layout, length: int, ranks: int, rank: int) -> tuple[Tokens, ...]:
    """The tokens of `rank`; chunks are rounded up, so that the last may be shorter."""
    if layout is Layout.CONTIGUOUS:
        return (_chunk(length, ranks, rank),)
    if layout is Layout.ZIGZAG:
        mirrored = 2 * ranks - 1 - rank
        return (_chunk(length, 2 * ranks, rank), _chunk(length, 2 * ranks, mirrored))
    if layout is Layout.STRIPED:
        return (_every(length, ranks, rank),)
    mirrored = 2 * ranks - 1 - rank
    return (_every(length, 2 * ranks, rank), _every(length, 2 * ranks, mirrored))


def work(layout: Layout, q_len: int, kv_len: int, ranks: int, *, causal: bool) -> Table:
    """Pairs [rank, step] of a ring.

    A causal query at position p sees the keys at positions <= p, as in `is_causal`.
    """
    queries = _arrays(layout, q_len, ranks)
    keys = _arrays(layout, kv_len, ranks)
    rank = np.arange(ranks)
    sources = (rank[:, None] - rank[None, :]) % ranks  # [rank, step]
    total = np.zeros((ranks, ranks), dtype=np.int64)
    for q_start, stride, q_count in queries:
        for k_start, _, k_count in keys:
            n, m = q_count[:, None], k_count[sources]
            if causal:
                offset = (q_start[:, None] - k_start[sources]) // stride
                total += _staircase(n, m, offset)
            else:
                total += n * m
    return total


def _staircase(n: Table, m: Table, offset: Table) -> Table:
    """Pairs i < n, j < m with j <= i + offset."""
    empty = np.clip(-offset, 0, n)  # rows that see nothing
    partial_end = np.clip(m - offset, empty, n)  # from here on a row sees all m
    rows = partial_end - empty
    first = empty + offset + 1  # keys of the first row that sees any
    partial = rows * first + rows * (rows - 1) // 2
    result: Table = np.where(m > 0, partial + (n - partial_end) * m, 0)
    return result


def _arrays(layout: Layout, length: int, ranks: int) -> list[tuple[Table, int, Table]]:
    """(starts by rank, stride, counts by rank) of each run that a rank holds."""
    by_rank = [held(layout, length, ranks, rank) for rank in range(ranks)]
    return [
        (
            np.array([runs[i].start for runs in by_rank], dtype=np.int64),
            by_rank[0][i].stride,
            np.array([runs[i].count for runs in by_rank], dtype=np.int64),
        )
        for i in range(len(by_rank[0]))
    ]


def _chunk(length: int, chunks: int, index: int) -> Tokens:
    size = -(-length // chunks)
    start = min(index * size, length)
    return Tokens(start, 1, min(size, length - start))


def _every(length: int, period: int, first: int) -> Tokens:
    return Tokens(first, period, max(0, -(-(length - first) // period)))
