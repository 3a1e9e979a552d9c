"""The ring: seconds, wire bytes and extra memory on the slowest rank.

Note [What the ring hides]
The transfer of the next chunk runs during the computation of a step, so the last step
has none to hide, and a step costs max(computation, transfer) if `overlap` is 1. Where
sending takes some of the cores that compute, the computation is slowed for as long as
bytes are sent, by 1 - overlap of that time. A ring has r steps, or fewer where a mask
leaves no rank anything to do. The backward has one hop of K and V fewer than steps, and
one of dK and dV per step: the sum of step t travels during step t + 1, beside K and V
on the same link, and the last hop, home, has nothing to hide behind.
Source of the overlap model: Liu, Zaharia and Abbeel, Ring Attention (arXiv
2310.01889), section 3; corrected to 4 FLOPs per pair and head dim.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import KEYS, ROWS, ring_step_seconds
from cpcompile.cost.symbols import (
    SEVERAL_STEPS,
    SUM_BYTES,
    B,
    D,
    E,
    M,
    W,
    e,
    g,
    h,
    hop,
    issue,
    larger,
    launch,
    merge,
    merge_bwd,
    merge_latency,
    overlap,
    pieces,
    smaller,
    steps,
)
from cpcompile.geometry.layout import Layout

# Elements on one rank of the ring: the chunk of k and v, the queries, the output.
KV = B * g * KEYS * (D + E)
Q = B * h * ROWS * D
OUT = B * h * ROWS * E
COPY_LAUNCHES = 2  # one each for k and v


def ring_forward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the forward time of cp::ring_attention; its first step merges nothing."""
    first, later = steps_seconds(causal, layout, backward=False)
    exposed = ring_exposed_seconds(causal, layout, backward=False)
    return SEVERAL_STEPS * copy_seconds() + first + (steps - 1) * later + exposed


def ring_backward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the backward time of cp::ring_attention."""
    first, later = steps_seconds(causal, layout, backward=True)
    exposed = ring_exposed_seconds(causal, layout, backward=True)
    return SEVERAL_STEPS * copy_seconds() + first + (steps - 1) * later + exposed


def ring_exposed_seconds(causal: bool, layout: Layout, backward: bool) -> sympy.Expr:
    """Return the time of one direction's transfers that adds to the time of the pass.

    See Note [What the ring hides].
    """
    first, later = steps_seconds(causal, layout, backward)
    middle_steps = larger(0, steps - 2)
    exposed = SEVERAL_STEPS * _added(e * KV, first)
    if not backward:
        return exposed + middle_steps * _added(e * KV, later)
    gradients = SUM_BYTES * KV
    return (
        exposed
        + middle_steps * _added(e * KV + gradients, later, messages=2)
        + SEVERAL_STEPS * _added(gradients, later)
        + SEVERAL_STEPS * (hop + gradients / W)
    )


def ring_transfer_seconds(backward: bool) -> sympy.Expr:
    """Return the time of all transfers of one direction, hidden or not."""
    seconds = (steps - 1) * (hop + e * KV / W)
    if backward:
        seconds += SEVERAL_STEPS * steps * (hop + SUM_BYTES * KV / W)
    return seconds


def ring_wire_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes that one rank sends.

    These are K and V for all steps but one, and dK and dV for all.
    """
    sent = (steps - 1) * e * KV
    return sent + SEVERAL_STEPS * steps * SUM_BYTES * KV if backward else sent


def ring_peak_extra_bytes(backward: bool) -> sympy.Expr:
    """Return the extra bytes: chunks sent and received, and sums.

    The backward has dK and dV chunks as well.
    """
    if not backward:
        other_dtype = smaller(1, SUM_BYTES - e)
        return SEVERAL_STEPS * 2 * e * KV + SUM_BYTES * OUT * (
            other_dtype + SEVERAL_STEPS
        )
    # New dq, dk and dv of a step lie beside dq and the two travelling sums.
    travelling = (2 * e + 2 * SUM_BYTES) * KV * SEVERAL_STEPS
    return travelling + e * KV + (e + SUM_BYTES) * Q


def ring_kernels(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the attention kernels in the forward: one per step and run of queries."""
    return steps * pieces if causal and layout is Layout.CONTIGUOUS else steps


def steps_seconds(
    causal: bool, layout: Layout, backward: bool
) -> tuple[sympy.Expr, sympy.Expr]:
    """Return the time of the first step and of each later one, which merges as well."""
    first, later = ring_step_seconds(causal, layout, backward)
    moved = merge_bwd * Q if backward else merge * OUT
    host = SEVERAL_STEPS * issue  # the device waits if the host is slower
    return (
        larger(first, host),
        larger(later + moved / M + merge_latency, host),
    )


def _added(sent: sympy.Expr, computation: sympy.Expr, messages: int = 1) -> sympy.Expr:
    """Return what messages that start with a computation add to its time."""
    sending = sent / W
    transfer = messages * hop + sending
    slowed = (1 - overlap) * smaller(sending, computation)
    return transfer - smaller(transfer, computation) + slowed


def copy_seconds() -> sympy.Expr:
    """Return the time to make k and v contiguous before they travel."""
    return 2 * e * KV / M + COPY_LAUNCHES * launch
