"""Seconds and bytes of each strategy on the slowest rank, as sympy expressions.

Legend: B batch, H query heads, G key/value heads, Sq and Sk lengths of the whole
sequences, D head dim of q and k, E head dim of v, e bytes per element, N ranks. Rates
and latencies are the symbols that `numbers` pairs with `HardwareProfile`.

Note [Contiguous causal attention waits for the last rank]
Every rank holds c = S / N tokens. Under a causal mask rank r has r + 1/2 blocks of
c x c scores to compute, and the last rank decides: N - 1/2 blocks, where balanced
ranks would have N / 2 each; a factor of 2 - 1/N. So both strategies are charged with
the last rank. In the ring its own block, the triangle, comes first and N - 1 dense
blocks follow. With Sq != Sk the sum of pairs stays exact, but the ring's steps after
the first are taken as equal. Uneven lengths are padded to a multiple of N: exact for
the messages, which are padded too, and an upper bound for the scores.

Note [What the ring hides]
The transfer of the next chunk runs during the computation of a step, so the last step
has none to hide, and a step costs max(computation, transfer). The backward has N - 1
hops of K and V and N hops of dK and dV: the sum of step t travels during step t + 1,
beside K and V on the same link, and the last hop, home, has nothing to hide behind.
Source of the overlap model: Liu, Zaharia and Abbeel, Ring Attention (arXiv
2310.01889), section 3; corrected to 4 FLOPs per pair and head dim.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.hardware import HardwareProfile
from cpcompile.layout import Chunks
from cpcompile.plan import Workload

# Five matrix products in the backward where the forward has two.
BACKWARD_FLOPS_PER_FORWARD_FLOP = sympy.Rational(5, 2)
# Calls of aten in ops/, each at least one kernel.
MERGE_LAUNCHES = (
    7  # RunningAttention._merge: ==, -, sigmoid, where, to, lerp, logaddexp
)
PACK_LAUNCHES = 2  # Packing.pack: one copy each for k and v
JOIN_LAUNCHES = 2  # one cat each for k and v

SYMBOLS = sympy.symbols(
    "B H G Sq Sk D E e N W W_all alpha M launch merge "
    "F_fwd F_fwd_causal F_bwd F_bwd_causal",
    positive=True,
)
B, H, G, Sq, Sk, D, E, e, N, W, W_all, alpha, M, launch, merge = SYMBOLS[:15]
F_fwd, F_fwd_causal, F_bwd, F_bwd_causal = SYMBOLS[15:]

# 0 on a single rank, which exchanges nothing, and 1 otherwise.
SEVERAL = sympy.Min(1, N - 1)
# Bytes per element of sums over steps, see accumulation_dtype.
SUM_BYTES = sympy.Max(4, e)
# Elements on one rank: the packed chunk of k and v, the queries, the output.
KV = B * G * (Sk / N) * (D + E)
Q = B * H * (Sq / N) * D
OUT = B * H * (Sq / N) * E


def numbers(workload: Workload, profile: HardwareProfile) -> dict[sympy.Symbol, float]:
    """The value of every symbol: the one place where numbers meet expressions."""
    ranks = workload.ranks
    return {
        B: workload.batch,
        H: workload.heads,
        G: workload.kv_heads,
        Sq: Chunks(workload.q_len, ranks).size * ranks,
        Sk: Chunks(workload.kv_len, ranks).size * ranks,
        D: workload.head_dim,
        E: workload.value_dim,
        e: workload.bytes_per_element,
        N: ranks,
        W: profile.link_bytes_per_second,
        W_all: profile.collective_bytes_per_second,
        alpha: profile.link_latency_seconds,
        M: profile.memory_bytes_per_second,
        launch: profile.kernel_launch_seconds,
        merge: profile.merge_bytes_per_element,
        F_fwd: profile.forward_flops_per_second,
        F_fwd_causal: profile.causal_forward_flops_per_second,
        F_bwd: profile.backward_flops_per_second,
        F_bwd_causal: profile.causal_backward_flops_per_second,
    }


def last_rank_pairs(causal: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """(query, key) pairs of the last rank: in dense blocks, in the triangular block."""
    rows = Sq / N
    if not causal:
        return rows * Sk, sympy.Integer(0)
    before = sympy.Min(Sq - rows, Sk)  # keys that all rows see
    side = sympy.Min(Sq, Sk) - before
    return rows * before, side * (side + 1) / 2 + (rows - side) * side


def attention_seconds(
    dense: sympy.Expr, triangular: sympy.Expr, backward: bool
) -> sympy.Expr:
    """Time of attention kernels over so many pairs, without their launches."""
    flops_per_pair = 2 * B * H * (D + E)  # two products, 2 FLOPs per multiply and add
    if backward:
        flops_per_pair *= BACKWARD_FLOPS_PER_FORWARD_FLOP
    rates = (F_bwd, F_bwd_causal) if backward else (F_fwd, F_fwd_causal)
    return flops_per_pair * (dense / rates[0] + triangular / rates[1])


def ring_step_seconds(causal: bool, backward: bool) -> tuple[sympy.Expr, sympy.Expr]:
    """Computation of the first ring step and of each later one, on the last rank."""
    dense, triangular = last_rank_pairs(causal)
    later_pairs = (Sq / N) * (sympy.Min(Sq, Sk) if causal else Sk) / N
    first_pairs = dense - (N - 1) * later_pairs
    first = attention_seconds(first_pairs, triangular, backward) + launch
    later = attention_seconds(later_pairs, sympy.Integer(0), backward) + launch
    if backward:  # dq, dk and dv of every step are added
        added = merge * (Q + KV) / M + 3 * launch
        return first + added, later + added
    return first, later + merge * OUT / M + MERGE_LAUNCHES * launch


def ring_forward_seconds(causal: bool) -> sympy.Expr:
    """Forward of cp::ring_attention."""
    first, later = ring_step_seconds(causal, backward=False)
    exposed = ring_exposed_seconds(causal, backward=False)
    return SEVERAL * _pack_seconds() + first + (N - 1) * later + exposed


def ring_backward_seconds(causal: bool) -> sympy.Expr:
    """Backward of cp::ring_attention, which packs and clears dK and dV first."""
    first, later = ring_step_seconds(causal, backward=True)
    exposed = ring_exposed_seconds(causal, backward=True)
    cleared = SUM_BYTES * KV / M + launch
    return _pack_seconds() + cleared + first + (N - 1) * later + exposed


def ring_exposed_seconds(causal: bool, backward: bool) -> sympy.Expr:
    """Transfers of one direction that outlast their step; Note [What the ring hides]"""
    first, later = ring_step_seconds(causal, backward)
    kv_hop = alpha + e * KV / W
    middle_steps = sympy.Max(0, N - 2)
    if not backward:
        return SEVERAL * _excess(kv_hop, first) + middle_steps * _excess(kv_hop, later)
    gradient_hop = alpha + SUM_BYTES * KV / W
    return (
        SEVERAL * _excess(kv_hop, first)
        + middle_steps * _excess(kv_hop + gradient_hop, later)
        + SEVERAL * _excess(gradient_hop, later)
        + SEVERAL * gradient_hop
    )


def ring_peak_extra_bytes(causal: bool, backward: bool) -> sympy.Expr:
    """Chunks sent and received, and sums; the backward has dK and dV chunks as well."""
    if not backward:
        return SEVERAL * 2 * e * KV + _output_sum_bytes(merges=SEVERAL)
    # New dq, dk and dv of a step lie beside dq and the two travelling sums.
    return (3 * e + 2 * SUM_BYTES) * KV + (e + SUM_BYTES) * Q


def ring_kernels(causal: bool) -> sympy.Expr:
    """Attention kernels in the forward: one per step."""
    return N


def all_gather_forward_seconds(causal: bool) -> sympy.Expr:
    """Forward of cp::all_gather_attention: gather, join, one or two kernels, merge."""
    kernels = all_gather_kernels(causal)
    return (
        SEVERAL * _joined_seconds()
        + attention_seconds(*last_rank_pairs(causal), backward=False)
        + kernels * launch
        + (kernels - 1) * (merge * OUT / M + MERGE_LAUNCHES * launch)
        + all_gather_exposed_seconds(causal, backward=False)
    )


def all_gather_backward_seconds(causal: bool) -> sympy.Expr:
    """Backward of cp::all_gather_attention: gather again, scatter dK and dV."""
    kernels = all_gather_kernels(causal)
    # dK and dV of all keys: cleared, added to, packed per rank, stacked.
    gradient_bytes = N * KV * (SUM_BYTES + merge + 2 * SUM_BYTES + 2 * SUM_BYTES)
    gradient_launches = 2 + 2 * kernels + PACK_LAUNCHES * N + 1
    return (
        SEVERAL * _joined_seconds()
        + attention_seconds(*last_rank_pairs(causal), backward=True)
        + kernels * (2 * launch + merge * Q / M)  # the kernel, and its dq is added
        + gradient_bytes / M
        + gradient_launches * launch
        + all_gather_exposed_seconds(causal, backward=True)
    )


def all_gather_exposed_seconds(causal: bool, backward: bool) -> sympy.Expr:
    """The collectives of one direction; nothing runs beside them."""
    bytes_sent = (N - 1) * KV * (e + SUM_BYTES if backward else e)
    return SEVERAL * alpha * (2 if backward else 1) + bytes_sent / W_all


def all_gather_peak_extra_bytes(causal: bool, backward: bool) -> sympy.Expr:
    """K and V of all ranks, twice while they are joined; dK and dV in the backward."""
    if backward:
        # k, v, their new gradients; the cleared, the packed and the stacked sums; dq.
        return (2 * e + 3 * SUM_BYTES) * N * KV + SUM_BYTES * Q
    gathered = SEVERAL * N * e * KV
    merges = all_gather_kernels(causal) - 1
    return gathered + sympy.Max(gathered, _output_sum_bytes(merges))


def all_gather_kernels(causal: bool) -> sympy.Expr:
    """Attention kernels in the forward: keys of earlier ranks, then the triangle."""
    return sympy.Min(N, 2) if causal else sympy.Integer(1)


def _excess(transfer: sympy.Expr, computation: sympy.Expr) -> sympy.Expr:
    return sympy.Max(0, transfer - computation)


def _output_sum_bytes(merges: sympy.Expr) -> sympy.Expr:
    """Beyond out: a new part where parts merge, a sum where it has another dtype."""
    other_dtype = sympy.Min(1, SUM_BYTES - e)
    return SUM_BYTES * OUT * (other_dtype + sympy.Min(1, merges))


def _pack_seconds() -> sympy.Expr:
    """Reads and writes this rank's k and v."""
    return 2 * e * KV / M + PACK_LAUNCHES * launch


def _joined_seconds() -> sympy.Expr:
    """Packs, and after the gather copies k and v of all ranks into one tensor each."""
    return _pack_seconds() + 2 * e * N * KV / M + JOIN_LAUNCHES * launch
