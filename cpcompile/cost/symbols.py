"""The symbols of the cost model, and the one place where numbers meet them.

Legend: B batch, H and G query and key/value heads, h and g those on one rank after the
all-to-all of Ulysses (H and G without one), Sq and Sk lengths of the whole sequences, D
head dim of q and k, E head dim of v, e bytes per element, live fraction of the pairs
that a mask leaves of those that causality leaves; u ranks that split the heads, r ranks
of the ring, N = u r, steps of it that a mask leaves (r without one); bias bytes of a
mask that is a tensor; latents values that keys and values are made of, latent_bytes of
them per token, latent_flops and latent_moved (bytes) to make a token's keys; parts in
which heads are exchanged one after the other, and parts_kv those of keys; saved 1 if a
backward follows. A rank attends from Sq / r rows. Rates and latencies pair with
`HardwareProfile`; those of links are of the tier on which the group works.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.hardware.links import Group, all_gather, all_to_all, message
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import Direction, Latents, Workload
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks

SYMBOLS = sympy.symbols(
    "B H G h g Sq Sk D E e live N u r pieces steps bias "
    "F_fwd F_fwd_causal F_bwd F_bwd_causal "
    "softmax row_fwd row_bwd tile slots alone launch issue "
    "M merge merge_bwd merge_latency overlap "
    "hop W hop_u W_u gather W_g scatter W_s relay W_relay "
    "latents latent_bytes latent_flops latent_moved parts parts_kv saved overlap_u",
    positive=True,
)
B, H, G, h, g, Sq, Sk, D, E, e, live, N, u, r, pieces, steps, bias = SYMBOLS[:17]
F_fwd, F_fwd_causal, F_bwd, F_bwd_causal = SYMBOLS[17:21]
softmax, row_fwd, row_bwd, tile, slots, alone, launch, issue = SYMBOLS[21:29]
M, merge, merge_bwd, merge_latency, overlap = SYMBOLS[29:34]
hop, W, hop_u, W_u, gather, W_g, scatter, W_s, relay, W_relay = SYMBOLS[34:44]
latents, latent_bytes, latent_flops, latent_moved = SYMBOLS[44:48]
parts, parts_kv, saved, overlap_u = SYMBOLS[48:]


def larger(*values: sympy.Expr) -> sympy.Expr:
    """Return the largest; sympy does not look for it, which would take long."""
    return sympy.Max(*values, evaluate=False)


def smaller(*values: sympy.Expr) -> sympy.Expr:
    """Return the smallest, as `larger` the largest."""
    return sympy.Min(*values, evaluate=False)


# 0 for one rank or step, which exchanges nothing, and 1 for more.
SEVERAL_R = smaller(1, r - 1)
SEVERAL_U = smaller(1, u - 1)
SEVERAL_STEPS = smaller(1, steps - 1)
SEVERAL = smaller(1, N - 1)
# Bytes per element of sums over steps, see accumulation_dtype.
SUM_BYTES = larger(4, e)


def numbers(
    workload: Workload,
    degrees: CPDegrees,
    profile: HardwareProfile,
    head_groups: int = 1,
) -> dict[sympy.Symbol, float]:
    """Return the value of every symbol."""
    split = HeadSplit(workload.heads, workload.kv_heads, degrees.ulysses)
    ring, ulysses = groups(degrees)
    live_fraction, ring_steps = workload.live_fraction, workload.ring_steps
    for work in workload.hybrid_rings:
        if work.degrees == degrees:
            live_fraction, ring_steps = work.live_fraction, work.steps
    if degrees.ring == 1 and workload.mean_live_fraction is not None:
        live_fraction = workload.mean_live_fraction  # every rank has all tokens
    speed = profile.speed(workload.bytes_per_element)
    everyone = Group(workload.ranks)
    hop_seconds, link = message(profile, ring)
    gather_seconds, gather_rate = all_gather(
        profile, everyone, profile.collective_bytes_per_second
    )
    scatter_seconds, scatter_rate = all_gather(
        profile, everyone, profile.reduce_scatter_bytes_per_second
    )
    exchange_seconds, exchange_rate = all_to_all(profile, ulysses)
    relay_seconds, relay_rate = all_to_all(profile, everyone)
    sources = workload.latents or Latents(0, 0, 0, 0)
    return {
        B: workload.batch,
        H: workload.heads,
        G: workload.kv_heads,
        h: split.per_rank,
        g: split.kv_per_rank,
        Sq: Chunks(workload.q_len, workload.ranks).size * workload.ranks,
        Sk: Chunks(workload.kv_len, workload.ranks).size * workload.ranks,
        D: workload.head_dim,
        E: workload.value_dim,
        e: workload.bytes_per_element,
        live: live_fraction,
        N: workload.ranks,
        u: degrees.ulysses,
        r: degrees.ring,
        pieces: degrees.ulysses if degrees.inner == "ring" else 1,
        steps: min(ring_steps or degrees.ring, degrees.ring),
        bias: workload.bias_bytes,
        F_fwd: speed * profile.forward_flops_per_second,
        F_fwd_causal: speed * profile.causal_forward_flops_per_second,
        F_bwd: speed * profile.backward_flops_per_second,
        F_bwd_causal: speed * profile.causal_backward_flops_per_second,
        softmax: profile.softmax_head_dims,
        row_fwd: profile.forward_row_overhead_keys,
        row_bwd: profile.backward_row_overhead_keys,
        tile: profile.tile_tokens,
        slots: profile.parallel_tiles,
        alone: profile.alone_speedup,
        launch: profile.kernel_launch_seconds,
        issue: profile.step_issue_seconds,
        M: profile.memory_bytes_per_second,
        merge: profile.merge_bytes_per_element,
        merge_bwd: profile.backward_merge_bytes_per_element,
        merge_latency: profile.merge_latency_seconds,
        overlap: overlapped(profile, link),
        hop: hop_seconds,
        W: link,
        hop_u: exchange_seconds,
        W_u: exchange_rate,
        gather: gather_seconds,
        W_g: gather_rate,
        scatter: scatter_seconds,
        W_s: scatter_rate,
        relay: relay_seconds,
        W_relay: relay_rate,
        latents: sources.values,
        latent_bytes: sources.bytes,
        latent_flops: sources.flops,
        latent_moved: sources.moved,
        parts: head_groups,
        parts_kv: split.key_groups(head_groups),
        saved: 0 if workload.direction is Direction.FORWARD else 1,
        overlap_u: overlapped(profile, exchange_rate),
    }


def overlapped(profile: HardwareProfile, rate: float) -> float:
    """Return the part of a transfer at `rate` bytes per second that computation hides.

    Sending a byte takes the same work of the cores that compute, however long it is on
    its way: of a slow transfer, as between nodes, more is hidden.
    """
    lost = 1 - profile.overlap_fraction
    return 1 - lost * min(1.0, rate / profile.link_bytes_per_second)


def groups(degrees: CPDegrees) -> tuple[Group, Group]:
    """Return the groups of the ring and the all-to-all, as they lie on the machine."""
    if degrees.inner == "ring":
        return Group(degrees.ring), Group(degrees.ulysses, degrees.ring)
    return Group(degrees.ring, degrees.ulysses), Group(degrees.ulysses)
