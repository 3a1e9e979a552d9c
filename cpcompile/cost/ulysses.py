"""The all-to-all of Ulysses: tokens are exchanged for heads before the attention.

Every rank sends h query heads and g key/value heads of its Sq / N and Sk / N tokens to
each of the u ranks that split the heads: q, k and v in one message, the output in
another; the backward sends dout one way, and dq, dk and dv the other. Messages are
packed and unpacked by copies. Sources: Jacobs et al., DeepSpeed Ulysses (arXiv
2309.14509); Fang and Zhao, USP (arXiv 2405.07719).

Note [Heads in groups]
The messages of one group of heads travel while another is attended to, so that only
the first to come and the last to go have nothing to hide them. Two groups are in memory
at a time, beside what is saved for the backward, as by an exchange of all heads, and
the results, which are joined at the end.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.relayout_cost import relaid_seconds
from cpcompile.cost.symbols import (
    SEVERAL,
    SEVERAL_U,
    SUM_BYTES,
    B,
    D,
    E,
    G,
    H,
    M,
    N,
    Sk,
    Sq,
    W_relay,
    W_u,
    e,
    g,
    h,
    hop_u,
    larger,
    launch,
    overlap_u,
    parts,
    parts_kv,
    relay,
    saved,
    smaller,
    u,
)

MESSAGES = 2  # of each direction
RELAYOUTS = 4  # q, k, v and the output
COPIES = 8  # q, k, v and the output are each packed and unpacked
# Elements of the messages to all u ranks, with the part that stays: q, k and v, or
# their gradients, and the output, or its gradient.
Q = B * u * h * Sq / N * D
KV = B * u * g * Sk / N * (D + E)
QKV = Q + KV
OUTPUT = B * u * h * Sq / N * E
SENT = QKV + OUTPUT
# Of q, k and v, what travels with one group of heads.
GROUP = Q / parts + KV / parts_kv
# Above 0 where key/value heads are sent to more than one rank.
REPEATED = larger(0, g * u - G) / G
# Bytes of q, k, v and the output of one rank.
RELAID = B * e * (H * Sq + G * Sk) / N * (D + E)


def exchange_seconds(backward: bool) -> sympy.Expr:
    """Return the time of the messages of one direction and their copies."""
    copies = 2 * 2 * e * SENT / M + COPIES * launch
    if backward:  # copies of a key/value head are summed in the accumulation dtype
        copies += smaller(1, REPEATED) * SUM_BYTES * SENT / M
    return SEVERAL_U * copies + exchange_transfer_seconds()


def exchange_transfer_seconds() -> sympy.Expr:
    """Return the time of the messages alone; nothing runs beside them."""
    return SEVERAL_U * MESSAGES * hop_u + exchange_wire_bytes() / W_u


def grouped_transfer_seconds() -> sympy.Expr:
    """Return the time of the messages of all groups, hidden or not."""
    return SEVERAL_U * parts * MESSAGES * hop_u + exchange_wire_bytes() / W_u


def grouped_exposed_seconds(attention: sympy.Expr) -> sympy.Expr:
    """Return the part of it that `attention` seconds do not hide.

    See Note [Heads in groups].
    """
    transfer = grouped_transfer_seconds()
    beside = (1 - 1 / parts) * smaller(transfer, attention)
    return transfer - overlap_u * beside


def grouped_copy_seconds(backward: bool) -> sympy.Expr:
    """Return the time of the copies: heads are gathered into groups, and joined."""
    copies = 2 * 3 * e * SENT / M + (COPIES + RELAYOUTS) * parts * launch
    if backward:
        copies += smaller(1, REPEATED) * SUM_BYTES * SENT / M
    return SEVERAL_U * copies


def grouped_peak_extra_bytes(backward: bool, summed: sympy.Expr) -> sympy.Expr:
    """Return the extra bytes; `summed` are those of attention to all heads of a rank.

    See Note [Heads in groups].
    """
    if not backward:
        during = 3 * GROUP + 4 * OUTPUT / parts + OUTPUT
        kept = saved * (SENT - GROUP - OUTPUT / parts)
        return SEVERAL_U * e * (during + kept)
    # Where groups share keys, dk and dv are summed and travel at the end.
    keys = smaller(2 * KV, 4 * KV / parts_kv)
    first = e * (SENT + (3 * OUTPUT + 4 * Q) / parts + keys) + summed / parts
    joined = 2 * Q + KV * (1 + smaller(1, parts_kv - 1))
    copied = larger(Q, KV / 2)  # one of them, as the next product reads it
    return SEVERAL_U * larger(first, e * (joined + copied))


def exchange_wire_bytes() -> sympy.Expr:
    """Return the bytes that one rank sends in one direction."""
    return e * SENT * (u - 1) / u


def exchange_peak_extra_bytes(backward: bool) -> sympy.Expr:
    """Return the largest extra bytes of both exchanges.

    They hold what is sent, what arrives, and what is unpacked. Beside the second one
    the operands or the gradients of the attention still exist.
    """
    if not backward:
        return SEVERAL_U * e * larger(3 * QKV, QKV + 3 * OUTPUT)
    # dk or dv of copied heads, before it is summed.
    sums = smaller(1, REPEATED) * SUM_BYTES * B * u * g * Sk / N * larger(D, E)
    return SEVERAL_U * larger(e * (QKV + 4 * OUTPUT), e * 4 * QKV + sums)


def exchange_held_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes held during the attention: operands, output and, later, dout."""
    return SEVERAL_U * e * (SENT + OUTPUT if backward else SENT)


def relayout_seconds() -> sympy.Expr:
    """Return the time in which q, k, v and the output change the layout for this call.

    In the backward it is that of their gradients.
    """
    return SEVERAL * relaid_seconds(RELAID, RELAYOUTS, N, relay, W_relay, M, launch)


def relayout_wire_bytes() -> sympy.Expr:
    """Return the bytes that one rank sends in one direction."""
    return RELAID * (N - 1) / N
