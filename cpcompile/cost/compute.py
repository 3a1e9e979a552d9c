"""Time of attention kernels, as sympy expressions.

Note [What a kernel loses at small sizes]
A row of queries costs its keys, and as much again as `row` more keys: loading,
normalising and storing. A causal kernel computes the tiles on the diagonal whole, half
a tile per row too much. A pair costs 2 (D + E) FLOPs at the rate of long sequences, and
the exponential, which does not grow with the head dim, as `softmax` more dims of each.
Rows are worked on in tiles; fewer tiles than run at once leave cores idle. Constants
and rates are fitted to measured curves, see docs/cost_model.md.

Note [Contiguous causal attention waits for the last rank]
Every rank holds c = S / N tokens. Under a causal mask rank r has r + 1/2 blocks of
c x c scores to compute, and the last rank decides: N - 1/2 blocks, where balanced
ranks would have N / 2 each; a factor of 2 - 1/N. So contiguous strategies are charged
with the last rank. Uneven lengths are padded to a multiple of N: exact for the
messages, which are padded too, and an upper bound for the scores.

Ranks that share cores are another matter: while one waits, others compute faster, by
`alone` if all wait. Rates are those of ranks that compute at once, so the last rank
needs 1 / alone of its time at best, and no less than all have to compute together.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.symbols import (
    SEVERAL_R,
    B,
    D,
    E,
    F_bwd,
    F_bwd_causal,
    F_fwd,
    F_fwd_causal,
    Sk,
    Sq,
    alone,
    h,
    larger,
    launch,
    live,
    pieces,
    r,
    row_bwd,
    row_fwd,
    slots,
    smaller,
    softmax,
    steps,
    tile,
)
from cpcompile.geometry.layout import Layout

# Five matrix products in the backward where the forward has two.
BACKWARD_FLOPS_PER_FORWARD_FLOP = sympy.Rational(5, 2)
# The head dim at which the rates of a profile were measured.
REFERENCE_HEAD_DIM = 128
# Queries and keys on one rank of the ring.
ROWS, KEYS = Sq / r, Sk / r


def kernel_seconds(
    rows: sympy.Expr,
    dense: sympy.Expr | int,
    triangular: sympy.Expr | int,
    backward: bool,
    diagonals: sympy.Expr | int = 1,
) -> sympy.Expr:
    """Return the time of one call of an attention kernel.

    See Note [What a kernel loses at small sizes].

    rows: those that see any key. dense, triangular: pairs in blocks that every row sees
    whole, and in blocks under the diagonal, which the mask thins out. diagonals: how
    many tiles a row of tiles has on the edge of the mask.
    """
    products = BACKWARD_FLOPS_PER_FORWARD_FLOP if backward else 1
    full, causal = (F_bwd, F_bwd_causal) if backward else (F_fwd, F_fwd_causal)
    overhead = rows * (row_bwd if backward else row_fwd)
    # Over the reference head dim: what `softmax` adds to D, it adds to that as well.
    pair = 2 * B * h * (D + E + 2 * softmax) * products
    pair *= REFERENCE_HEAD_DIM / (REFERENCE_HEAD_DIM + softmax)
    edge = smaller(1, triangular) * diagonals * rows * smaller(tile, rows) / 2
    busy = (live * dense + overhead) / full + (live * triangular + edge) / causal
    idle = larger(1, slots * tile / (B * h * rows))
    return pair * busy * idle + launch


def last_rank_pairs(
    causal: bool, ranks: sympy.Expr = r
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the (query, key) pairs of the last rank: in dense blocks, in triangles.

    Under the contiguous layout; see Note [Contiguous causal attention waits for the
    last rank].
    """
    rows = Sq / ranks
    if not causal:
        return rows * Sk, sympy.Integer(0)
    before = smaller(Sq - rows, Sk)  # keys that all rows see
    side = smaller(Sq, Sk) - before
    return rows * before, side * (side + 1) / 2 + (rows - side) * side


def balanced_pairs(ranks: sympy.Expr = r) -> sympy.Expr:
    """Return the causal pairs of each of `ranks` ranks under a balanced layout."""
    dense, triangular = last_rank_pairs(True, sympy.Integer(1))
    return (dense + triangular) / ranks


def ring_step_seconds(
    causal: bool, layout: Layout, backward: bool
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the time of the first step of a ring, and of each later one.

    These are kernels on the last rank.

    Contiguous: the last rank's own block, the triangle, comes first, and dense blocks
    follow. With `pieces` runs of tokens per rank (a ring inside of Ulysses), a later
    step leaves half of all blocks but the diagonal ones. Zigzag: later steps are dense
    rectangles of half the keys. Striped and fold: every step is a triangle. With
    Sq != Sk the sum of pairs is exact, but later steps are taken as equal.
    """
    if not causal:
        step = kernel_seconds(ROWS, ROWS * Sk / steps, 0, backward)
        return step, step
    if layout is Layout.CONTIGUOUS:
        dense, triangular = last_rank_pairs(causal)
        share = (1 + 1 / pieces) / 2
        later_pairs = share * ROWS * smaller(Sq, Sk) / r
        first_dense = larger(0, dense - (r - 1) * ROWS * smaller(Sq, Sk) / r)
        shared = _shared_cores(first_dense + triangular + (r - 1) * later_pairs)
        first = kernel_seconds(ROWS, first_dense, triangular, backward) * shared
        later = kernel_seconds(ROWS, later_pairs, 0, backward) * shared
        extra = (pieces - 1) * launch
        return first + extra, later + extra
    of_step = balanced_pairs() / r
    first = kernel_seconds(ROWS, 0, of_step, backward)
    if layout is Layout.ZIGZAG:
        return first, kernel_seconds(ROWS, of_step, 0, backward)
    return first, first


def gathered_seconds(causal: bool, layout: Layout, backward: bool) -> sympy.Expr:
    """Return the time of the kernels of the last rank's queries on all keys."""
    if not causal or layout is Layout.CONTIGUOUS:
        dense, triangular = last_rank_pairs(causal)
        shared = _shared_cores(dense + triangular) if causal else 1
        return kernel_seconds(ROWS, dense, triangular, backward) * shared
    pairs = balanced_pairs()
    if layout is Layout.ZIGZAG:  # two triangles of half the rows, the rest is dense
        diagonal = ROWS * KEYS / 4
        return kernel_seconds(ROWS, pairs - diagonal, diagonal, backward)
    # A tile of rows of every r-th token has its edge in r tiles of keys.
    return kernel_seconds(ROWS, 0, pairs, backward, diagonals=r)


def gathered_kernels(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the number of attention kernels that `gathered_seconds` is for."""
    return 1 + SEVERAL_R if causal and layout is Layout.ZIGZAG else sympy.Integer(1)


def _shared_cores(last: sympy.Expr) -> sympy.Expr:
    """Return the factor of contiguous causal attention. last: the last rank's pairs."""
    return larger(1 / alone, smaller(1, balanced_pairs() / last))
