"""Costs of the all-gather of keys and values on the slowest rank.

The backward gathers again and reduce-scatters dK and dV in the accumulation dtype.
Nothing runs beside the collectives.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import gathered_kernels, gathered_seconds
from cpcompile.cost.ring import COPY_LAUNCHES, KV, OUT, Q
from cpcompile.cost.symbols import (
    SEVERAL,
    SUM_BYTES,
    M,
    N,
    W_g,
    W_s,
    e,
    gather,
    larger,
    launch,
    scatter,
)
from cpcompile.geometry.layout import Layout

JOIN_LAUNCHES = 2  # one cat each for k and v


def all_gather_forward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the forward time of cp::all_gather_attention: gather, join, attend."""
    return (
        SEVERAL * joined_seconds()
        + gathered_seconds(causal, layout, backward=False)
        + all_gather_transfer_seconds(backward=False)
    )


def all_gather_backward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the backward time of cp::all_gather_attention.

    It gathers again, and scatters dK and dV.
    """
    # dK and dV of all keys are packed per rank, stacked, and converted at home.
    gradient_bytes = 4 * SUM_BYTES * N * KV + (e + SUM_BYTES) * KV
    gradient_launches = COPY_LAUNCHES * N + 3
    return (
        SEVERAL * joined_seconds()
        + gathered_seconds(causal, layout, backward=True)
        + SEVERAL * (gradient_bytes / M + gradient_launches * launch)
        + all_gather_transfer_seconds(backward=True)
    )


def all_gather_transfer_seconds(backward: bool) -> sympy.Expr:
    """Return the time of the collectives of one direction, all exposed."""
    seconds = SEVERAL * gather + (N - 1) * e * KV / W_g
    if backward:
        seconds += SEVERAL * scatter + (N - 1) * SUM_BYTES * KV / W_s
    return seconds


def all_gather_wire_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes that one rank sends."""
    return (N - 1) * KV * (e + SUM_BYTES if backward else e)


def all_gather_peak_extra_bytes(backward: bool) -> sympy.Expr:
    """Return the extra bytes: K and V of all ranks, twice while they are joined.

    The backward has dK and dV as well.
    """
    if backward:
        # k, v; dk and dv of all keys, packed, and stacked; dq.
        return (e + 3 * SUM_BYTES) * N * KV + SUM_BYTES * Q
    gathered = SEVERAL * N * e * KV
    return gathered + larger(gathered, SUM_BYTES * OUT)


def all_gather_kernels(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the number of attention kernels in the forward."""
    return gathered_kernels(causal, layout)


def joined_seconds() -> sympy.Expr:
    """Return the time to pack k and v, and to join those of all ranks.

    After the gather, k and v of all ranks are copied into one tensor each.
    """
    packed = 2 * e * KV / M + COPY_LAUNCHES * launch
    return packed + 2 * e * N * KV / M + JOIN_LAUNCHES * launch
