"""Count exactly the (query, key) pairs of each rank in each step of a ring.

In step t rank r meets the keys of rank (r - t) mod N. Pairs depend on how many tokens
both hold, on their halves in zigzag, and on the distance of their first tokens in the
order of the ranks as far as they overlap. Few cases differ, and each is counted once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.visibility import visible_chunk, visible_tokens

Table = npt.NDArray[np.int64]


def work(layout: Layout, q_len: int, kv_len: int, ranks: int, *, causal: bool) -> Table:
    """Count the (query, key) pairs of a ring, as a table [rank, step].

    A causal query at position p sees the keys at positions <= p, as in `is_causal`.
    Raises ValueError for q_len != kv_len unless the layout is contiguous.
    """
    if q_len != kv_len and layout is not Layout.CONTIGUOUS:
        raise ValueError(
            f"{layout.value} layout: got {q_len} queries and {kv_len} keys; it needs "
            "as many queries as keys"
        )
    queries = TokenLayout.of(layout, q_len, ranks)
    keys = TokenLayout.of(layout, kv_len, ranks)
    rank = np.arange(ranks)
    sources = (rank[:, None] - rank) % ranks  # [rank, step]
    distance = _starts(queries)[:, None] - _starts(keys)[sources]
    distance = np.clip(distance, -queries.size, keys.size)
    sizes, key_sizes = _sizes(queries), _sizes(keys)
    case = sizes[:, None] * ranks + key_sizes[sources]
    case = case * (queries.size + keys.size + 1) + distance
    _, first, of_case = np.unique(case.ravel(), return_index=True, return_inverse=True)

    def pairs(rank: int, source: int) -> int:
        rows = queries.count(rank)
        if causal and layout is not Layout.CONTIGUOUS:
            visible = visible_tokens(queries, rank, source)
        else:
            places = queries.start(rank), rows, keys.start(source), keys.count(source)
            visible = visible_chunk(*places, keys.size, causal)
        return visible.pairs(rows, keys.size)

    counted = [pairs(int(i) // ranks, int(sources.flat[i])) for i in first]
    table: Table = np.array(counted, dtype=np.int64)[of_case].reshape(ranks, ranks)
    return table


def _starts(tokens: TokenLayout) -> Table:
    return np.array([tokens.start(rank) for rank in range(tokens.ranks)])


def _sizes(tokens: TokenLayout) -> Table:
    """Return numbers < ranks, equal for ranks with equal halves (zigzag's)."""
    sizes = [(tokens.count(rank), tokens.head(rank)) for rank in range(tokens.ranks)]
    numbers = {size: number for number, size in enumerate(dict.fromkeys(sizes))}
    return np.array([numbers[size] for size in sizes])
