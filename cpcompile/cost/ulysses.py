"""The all-to-all of Ulysses: tokens are exchanged for heads before the attention.

Every rank sends h query heads and g key/value heads of its Sq / N and Sk / N tokens to
each of the u ranks that split the heads: q, k and v in one message, the output in
another; the backward sends dout one way, and dq, dk and dv the other. Messages are
packed and unpacked by copies. Sources: Jacobs et al., DeepSpeed Ulysses (arXiv
2309.14509); Fang and Zhao, USP (arXiv 2405.07719).
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
    relay,
    smaller,
    u,
)

MESSAGES = 2  # of each direction
RELAYOUTS = 4  # q, k, v and the output
COPIES = 8  # q, k, v and the output are each packed and unpacked
# Elements of the messages to all u ranks, with the part that stays: q, k and v, or
# their gradients, and the output, or its gradient.
QKV = B * u * (h * Sq / N * D + g * Sk / N * (D + E))
OUTPUT = B * u * h * Sq / N * E
SENT = QKV + OUTPUT
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
