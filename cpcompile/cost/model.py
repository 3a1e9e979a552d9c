"""Seconds and bytes of every strategy on the slowest rank, as sympy expressions.

One function per strategy; each gives the costs of one pass, forward or backward. The
kernels are in compute.py, the symbols and their numbers in symbols.py.

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

Note [What Ulysses exchanges]
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

Note [Keys made of latents]
Keys and values are computed token by token from something narrower: in multi-head
latent attention (DeepSeek-V2, arXiv 2405.04434) of 576 numbers a token for 40,960. The
ranks gather that, and each computes the keys and values of all tokens by itself: few
bytes for repeated work. The backward gathers and computes them again, so that nothing
as wide lives from the forward to the backward, and sums the gradients of the latents
over the ranks.

Note [Split keys]
A few queries, which every rank has. A rank reads its part of the keys once, whatever
the number of queries, so that its memory is the limit as often as its arithmetic. Then
partial results in the accumulation dtype are gathered, and merged by every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import (
    KEYS,
    ROWS,
    gathered_kernels,
    gathered_seconds,
    kernel_seconds,
    ring_step_seconds,
)
from cpcompile.cost.relayout_cost import relaid_seconds
from cpcompile.cost.symbols import (
    SEVERAL,
    SEVERAL_STEPS,
    SEVERAL_U,
    SUM_BYTES,
    B,
    D,
    E,
    F_fwd,
    G,
    H,
    M,
    N,
    Sk,
    Sq,
    W,
    W_g,
    W_relay,
    W_s,
    W_u,
    bias,
    e,
    g,
    gather,
    h,
    hop,
    hop_u,
    issue,
    larger,
    latent_bytes,
    latent_flops,
    latent_moved,
    latents,
    launch,
    merge,
    merge_bwd,
    merge_latency,
    overlap,
    overlap_u,
    parts,
    parts_kv,
    pieces,
    r,
    relay,
    saved,
    scatter,
    smaller,
    steps,
    u,
)
from cpcompile.geometry.layout import Layout

# Elements on one rank of the ring: the chunk of k and v, the queries, the output.
KV = B * g * KEYS * (D + E)
Q = B * h * ROWS * D
OUT = B * h * ROWS * E
COPY_LAUNCHES = 2  # one each for k and v
JOIN_LAUNCHES = 2  # one cat each for k and v; one copy packs a latent, one joins it
# Seconds to make k and v contiguous before they travel.
COPY_SECONDS = 2 * e * KV / M + COPY_LAUNCHES * launch

# Elements of the messages of Ulysses to all u ranks, with the part that stays: q, k and
# v, or their gradients, and the output, or its gradient.
QUERIES_SENT = B * u * h * Sq / N * D
KEYS_SENT = B * u * g * Sk / N * (D + E)
QKV = QUERIES_SENT + KEYS_SENT
OUTPUT = B * u * h * Sq / N * E
SENT = QKV + OUTPUT
MESSAGES = 2  # of each direction
RELAYOUTS = 4  # q, k, v and the output
COPIES = 8  # q, k, v and the output are each packed and unpacked
# Above 0 where key/value heads are sent to more than one rank.
REPEATED = larger(0, g * u - G) / G
# Bytes that one rank sends in one direction, and seconds of the messages alone.
EXCHANGE_BYTES = e * SENT * (u - 1) / u
EXCHANGE_SECONDS = SEVERAL_U * MESSAGES * hop_u + EXCHANGE_BYTES / W_u
# Bytes of q, k, v and the output of one rank.
RELAID = B * e * (H * Sq + G * Sk) / N * (D + E)

# Bytes of the latents of one rank; seconds to compute the keys and values of all
# tokens, and to pack latents for a collective and join those of all.
OWN_LATENTS = latent_bytes * Sk / N
KEYS_SECONDS = Sk * (latent_flops / F_fwd + latent_moved / M)
JOIN_SECONDS = 2 * (N + 1) * OWN_LATENTS / M + JOIN_LAUNCHES * latents * launch
BACKWARD_PER_FORWARD = 2  # the backward of a product is two of its size

# Elements of split keys on one rank: out and the log-sum-exp of every query.
PARTIAL = B * H * Sq * (E + 1)
MERGE_LAUNCHES = 8  # packing, the merge of (out, lse), and the dtype of the result


class PassCost(NamedTuple):
    """What one pass costs on the slowest rank.

    transfer: seconds of all communication; exposed: the part that adds to `seconds`.
    kernels: those of attention in the forward.
    """

    seconds: sympy.Expr
    exposed: sympy.Expr
    transfer: sympy.Expr
    wire_bytes: sympy.Expr
    peak_extra_bytes: sympy.Expr
    kernels: sympy.Expr

    @classmethod
    def unhidden(cls, seconds: sympy.Expr, transfer: sympy.Expr, *rest: Any) -> Self:
        """Make the cost of a pass in which nothing runs beside the collectives."""
        return cls(seconds, transfer, transfer, *rest)

    def then(self, backward: PassCost) -> PassCost:
        """Add a backward to this forward; `kernels` are the forward's."""
        sums = [x + y for x, y in zip(self[:4], backward[:4], strict=True)]
        peak = larger(self.peak_extra_bytes, backward.peak_extra_bytes)
        return PassCost._make([*sums, peak, self.kernels])


def ring_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of ring attention over all ranks: u = 1.

    See Note [What the ring hides].
    """
    first, later = steps_seconds(causal, layout, backward)
    keys, gradients = e * KV, SUM_BYTES * KV
    middle_steps = larger(0, steps - 2)
    exposed = SEVERAL_STEPS * _added(keys, first)
    transfer = (steps - 1) * (hop + keys / W)
    sent = (steps - 1) * e * KV
    if backward:
        last_hop = hop + gradients / W
        exposed += middle_steps * _added(keys + gradients, later, messages=2)
        exposed += SEVERAL_STEPS * _added(gradients, later) + SEVERAL_STEPS * last_hop
        transfer += SEVERAL_STEPS * steps * last_hop
        sent += SEVERAL_STEPS * steps * SUM_BYTES * KV
        # New dq, dk and dv of a step lie beside dq and the two travelling sums.
        travelling = (2 * e + 2 * SUM_BYTES) * KV * SEVERAL_STEPS
        peak = travelling + e * KV + (e + SUM_BYTES) * Q
    else:
        exposed += middle_steps * _added(keys, later)
        # Chunks sent and received, and sums.
        sums = smaller(1, SUM_BYTES - e) + SEVERAL_STEPS
        peak = SEVERAL_STEPS * 2 * e * KV + SUM_BYTES * OUT * sums
    computed = SEVERAL_STEPS * COPY_SECONDS + first + (steps - 1) * later
    # One kernel per step and run of queries.
    kernels = steps * pieces if causal and layout is Layout.CONTIGUOUS else steps
    return PassCost(computed + exposed, exposed, transfer, sent, peak, kernels)


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


def all_gather_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-gather of keys and values: u = 1.

    The backward gathers again and reduce-scatters dK and dV in the accumulation dtype.
    """
    # After the gather, k and v of all ranks are copied into one tensor each.
    joined = COPY_SECONDS + 2 * e * N * KV / M + JOIN_LAUNCHES * launch
    computed = SEVERAL * joined + gathered_seconds(causal, layout, backward)
    transfer = SEVERAL * gather + (N - 1) * e * KV / W_g
    gathered = SEVERAL * N * e * KV
    peak = gathered + larger(gathered, SUM_BYTES * OUT)  # twice while they are joined
    if backward:
        # dK and dV of all keys are packed per rank, stacked, and converted at home.
        gradient_bytes = 4 * SUM_BYTES * N * KV + (e + SUM_BYTES) * KV
        gradient_launches = COPY_LAUNCHES * N + 3
        computed += SEVERAL * (gradient_bytes / M + gradient_launches * launch)
        transfer += SEVERAL * scatter + (N - 1) * SUM_BYTES * KV / W_s
        # k, v; dk and dv of all keys, packed, and stacked; dq.
        peak = (e + 3 * SUM_BYTES) * N * KV + SUM_BYTES * Q
    sent = (N - 1) * KV * (e + SUM_BYTES if backward else e)
    kernels = gathered_kernels(causal, layout)
    return PassCost.unhidden(computed + transfer, transfer, sent, peak, kernels)


def latents_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of keys that every rank makes of gathered latents: u = 1.

    See Note [Keys made of latents].
    """
    attention = gathered_seconds(causal, layout, backward)
    # Latents, keys and values of all ranks; dK and dV, as sums and in the keys' dtype.
    copies = 2 * e + SUM_BYTES if backward else e
    return PassCost.unhidden(
        attention + SEVERAL * made_seconds(backward),
        _latents_transfer(backward),
        (N - 1) * OWN_LATENTS * (2 if backward else 1),
        SEVERAL * N * (OWN_LATENTS + copies * KV),
        gathered_kernels(causal, layout),
    )


def made_seconds(backward: bool) -> sympy.Expr:
    """Return the time to gather latents of several ranks, and to make keys of them.

    The backward does so again, and brings the gradients to the latents. What other
    strategies compute as well, each rank for its own tokens, does not count.
    """
    repeated = (1 - 1 / N) * KEYS_SECONDS
    if backward:
        repeated = KEYS_SECONDS + JOIN_SECONDS + BACKWARD_PER_FORWARD * repeated
    return JOIN_SECONDS + repeated + _latents_transfer(backward)


def _latents_transfer(backward: bool) -> sympy.Expr:
    seconds = SEVERAL * latents * gather + (N - 1) * OWN_LATENTS / W_g
    if backward:
        seconds += SEVERAL * latents * scatter + (N - 1) * OWN_LATENTS / W_s
    return seconds


def ulysses_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-to-all over all ranks and one kernel.

    Here r = 1, and no layout matters.
    """
    none, one = sympy.Integer(0), sympy.Integer(1)
    seconds, _ = ring_step_seconds(causal, Layout.CONTIGUOUS, backward)
    attention = (seconds, none, none, _summed_bytes(causal, backward), one)
    return _exchanged(PassCost.unhidden(*attention), backward)


def hybrid_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-to-all over u ranks, and a ring over their r groups."""
    return _exchanged(ring_cost(causal, layout, backward), backward)


def _exchanged(attention: PassCost, backward: bool) -> PassCost:
    """Return the cost of an attention between two exchanges.

    These hold what is sent, what arrives, and what is unpacked. Beside the second one
    the operands or the gradients of the attention still exist. See Note [What Ulysses
    exchanges].
    """
    mask = _mask_wire_bytes(backward)
    transfer = EXCHANGE_SECONDS + mask / W_u
    if backward:
        # dk or dv of copied heads, before it is summed.
        sums = smaller(1, REPEATED) * SUM_BYTES * B * u * g * Sk / N * larger(D, E)
        exchange = SEVERAL_U * larger(e * (QKV + 4 * OUTPUT), e * 4 * QKV + sums)
    else:
        exchange = SEVERAL_U * e * larger(3 * QKV, QKV + 3 * OUTPUT)
    # Operands, output and, later, dout are there during the attention.
    held = SEVERAL_U * e * (SENT + OUTPUT if backward else SENT)
    peak = larger(exchange, held + attention.peak_extra_bytes)
    return PassCost(
        seconds=attention.seconds + exchange_copy_seconds(backward) + transfer,
        exposed=attention.exposed + transfer,
        transfer=attention.transfer + transfer,
        wire_bytes=attention.wire_bytes + EXCHANGE_BYTES + mask,
        peak_extra_bytes=peak + bias / r,
        kernels=attention.kernels,
    )


def exchange_copy_seconds(backward: bool, grouped: bool = False) -> sympy.Expr:
    """Return the time of the copies of two exchanges.

    grouped: heads are gathered into groups, and joined.
    """
    times, launches = (3, (COPIES + RELAYOUTS) * parts) if grouped else (2, COPIES)
    copies = 2 * times * e * SENT / M + launches * launch
    if backward:  # copies of a key/value head are summed in the accumulation dtype
        copies += smaller(1, REPEATED) * SUM_BYTES * SENT / M
    return SEVERAL_U * copies


def grouped_ulysses_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of Ulysses with several groups of heads, one after the other.

    See Note [Heads in groups].
    """
    attention, _ = ring_step_seconds(causal, Layout.CONTIGUOUS, backward)
    attention += (parts - 1) * launch
    mask = _mask_wire_bytes(backward)
    transfer = SEVERAL_U * parts * MESSAGES * hop_u + EXCHANGE_BYTES / W_u
    beside = (1 - 1 / parts) * smaller(transfer, attention)
    exposed = transfer - overlap_u * beside + mask / W_u
    if backward:
        # Where groups share keys, dk and dv are summed and travel at the end.
        keys = smaller(2 * KEYS_SENT, 4 * KEYS_SENT / parts_kv)
        first = e * (SENT + (3 * OUTPUT + 4 * QUERIES_SENT) / parts + keys)
        first += _summed_bytes(causal, backward) / parts
        joined = 2 * QUERIES_SENT + KEYS_SENT * (1 + smaller(1, parts_kv - 1))
        # One of them is copied, as the next product reads it.
        copied = larger(QUERIES_SENT, KEYS_SENT / 2)
        peak = SEVERAL_U * larger(first, e * (joined + copied))
    else:
        group = QUERIES_SENT / parts + KEYS_SENT / parts_kv  # of q, k and v
        during = 3 * group + 4 * OUTPUT / parts + OUTPUT
        peak = SEVERAL_U * e * (during + saved * (SENT - group - OUTPUT / parts))
    return PassCost(
        seconds=attention + exchange_copy_seconds(backward, grouped=True) + exposed,
        exposed=exposed,
        transfer=transfer + mask / W_u,
        wire_bytes=EXCHANGE_BYTES + mask,
        peak_extra_bytes=peak + bias,
        kernels=parts,
    )


def _summed_bytes(causal: bool, backward: bool) -> sympy.Expr:
    """Return the extra bytes of one kernel on all heads of a rank.

    Gradients and the sum of dq, as in a ring of one; the forward sums in registers.
    """
    if not backward:
        return sympy.Integer(0)
    return ring_cost(causal, Layout.CONTIGUOUS, backward).peak_extra_bytes


def _mask_wire_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes of a mask tensor's rows that a rank sends; 0 in the backward.

    The forward gets them for the backward too.
    """
    return sympy.Integer(0) if backward else bias / r * (u - 1) / u


def split_kv_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of split keys: partial results are gathered; no backward.

    See Note [Split keys].
    """
    sent = (N - 1) * SUM_BYTES * PARTIAL
    transfer = SEVERAL * gather + sent / W_g
    partial = larger(kernel_seconds(Sq, Sq * KEYS, 0, backward=False), e * KV / M)
    merged = SUM_BYTES * (2 + 3 * N) * PARTIAL / M + MERGE_LAUNCHES * launch
    # Partial results: its own, packed, and those of all ranks, before and after
    # weighing.
    peak = SUM_BYTES * (2 + 2 * N) * PARTIAL
    seconds = partial + SEVERAL * (merged + transfer)
    return PassCost.unhidden(seconds, transfer, sent, peak, sympy.Integer(1))


def relayout_cost() -> tuple[sympy.Expr, sympy.Expr]:
    """Return (seconds, wire bytes) of making a layout for one pass, and undoing it.

    q, k, v and the output, or their gradients, change the layout for this call.
    """
    seconds = relaid_seconds(RELAID, RELAYOUTS, N, relay, W_relay, M, launch)
    return SEVERAL * seconds, SEVERAL * RELAID * (N - 1) / N
