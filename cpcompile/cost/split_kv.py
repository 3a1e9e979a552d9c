"""Split keys: costs of a few queries, which every rank has, on the slowest rank.

A rank reads its part of the keys once, whatever the number of queries, so that its
memory is the limit as often as its arithmetic. Then partial results in the accumulation
dtype are gathered, and merged by every rank.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import KEYS, kernel_seconds
from cpcompile.cost.ring import KV
from cpcompile.cost.symbols import (
    SEVERAL,
    SUM_BYTES,
    B,
    E,
    H,
    M,
    N,
    Sq,
    W_g,
    e,
    gather,
    larger,
    launch,
)

MERGE_LAUNCHES = 8  # packing, the merge of (out, lse), and the dtype of the result
# Elements on one rank: out and the log-sum-exp of every query.
PARTIAL = B * H * Sq * (E + 1)


def split_kv_seconds() -> sympy.Expr:
    """Return the forward time of cp::split_kv_attention."""
    merged = SUM_BYTES * (2 + 3 * N) * PARTIAL / M + MERGE_LAUNCHES * launch
    return partial_seconds() + SEVERAL * (merged + split_kv_transfer_seconds())


def partial_seconds() -> sympy.Expr:
    """Return the time of attention of all queries to the keys of one rank."""
    return larger(kernel_seconds(Sq, Sq * KEYS, 0, backward=False), e * KV / M)


def split_kv_transfer_seconds() -> sympy.Expr:
    """Return the time of the one collective, which is exposed."""
    return SEVERAL * gather + split_kv_wire_bytes() / W_g


def split_kv_wire_bytes() -> sympy.Expr:
    """Return the bytes that one rank sends."""
    return (N - 1) * SUM_BYTES * PARTIAL


def split_kv_peak_extra_bytes() -> sympy.Expr:
    """Return the extra bytes of partial results.

    These are its own, packed, and those of all ranks, before and after weighing.
    """
    return SUM_BYTES * (2 + 2 * N) * PARTIAL
