"""Costs of keys and values that every rank makes of gathered latents.

Keys and values are computed token by token from something narrower: in multi-head
latent attention (DeepSeek-V2, arXiv 2405.04434) of 576 numbers a token for 40,960. The
ranks gather that, and each computes the keys and values of all tokens by itself: few
bytes for repeated work. The backward gathers and computes them again, so that nothing
as wide lives from the forward to the backward, and sums the gradients of the latents
over the ranks. Nothing runs beside the collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import gathered_seconds
from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import Direction, Latents, Workload
from cpcompile.cost.ring import KV
from cpcompile.cost.symbols import (
    SEVERAL,
    SUM_BYTES,
    SYMBOLS,
    F_fwd,
    M,
    N,
    Sk,
    W_g,
    W_s,
    e,
    gather,
    latent_bytes,
    latent_flops,
    latent_moved,
    latents,
    launch,
    numbers,
    scatter,
)
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout

# The backward of a product is two of its size.
BACKWARD_PER_FORWARD = 2
JOIN_LAUNCHES = 2  # one copy packs a value for the collective, one joins the parts
# Bytes of the latents of one rank.
OWN = latent_bytes * Sk / N


def latents_forward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the forward time: make all keys and values, attend."""
    attention = gathered_seconds(causal, layout, backward=False)
    return attention + SEVERAL * made_forward_seconds()


def latents_backward_seconds(causal: bool, layout: Layout) -> sympy.Expr:
    """Return the backward time, in which keys and values are made again."""
    attention = gathered_seconds(causal, layout, backward=True)
    return attention + SEVERAL * made_backward_seconds()


def made_forward_seconds() -> sympy.Expr:
    """Return the time to gather latents of several ranks, and to make keys of them."""
    transfer = latents_transfer_seconds(backward=False)
    return joined_seconds() + repeated_seconds() + transfer


def made_backward_seconds() -> sympy.Expr:
    """Return the time to do so again, and to bring the gradients to the latents."""
    again = joined_seconds() + made_seconds()
    gradients = joined_seconds() + BACKWARD_PER_FORWARD * repeated_seconds()
    return again + gradients + latents_transfer_seconds(backward=True)


def made_seconds() -> sympy.Expr:
    """Return the time to compute the keys and values of all tokens."""
    return Sk * (latent_flops / F_fwd + latent_moved / M)


def repeated_seconds() -> sympy.Expr:
    """Return the part of it that other strategies leave to other ranks."""
    return (1 - 1 / N) * made_seconds()


def joined_seconds() -> sympy.Expr:
    """Return the time to pack latents for a collective, and to join those of all."""
    return 2 * (N + 1) * OWN / M + JOIN_LAUNCHES * latents * launch


def latents_transfer_seconds(backward: bool) -> sympy.Expr:
    """Return the time of the collectives of one direction, all exposed."""
    seconds = SEVERAL * latents * gather + (N - 1) * OWN / W_g
    if backward:
        seconds += SEVERAL * latents * scatter + (N - 1) * OWN / W_s
    return seconds


def latents_wire_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes that one rank sends."""
    return (N - 1) * OWN * (2 if backward else 1)


def latents_peak_extra_bytes(backward: bool) -> sympy.Expr:
    """Return the extra bytes: latents, keys and values of all ranks.

    The backward has dK and dV as well, as sums and in the dtype of the keys.
    """
    copies = 2 * e + SUM_BYTES if backward else e
    return SEVERAL * N * (OWN + copies * KV)


@dataclass(frozen=True)
class LatentPrices:
    """Seconds of a call per value that is gathered, and per byte of it and token.

    The formulas are linear in what a cut through the computation of the keys decides:
    how many values are gathered, their bytes, and the work that comes after them. Those
    to compute keys are per operation and per byte moved, of a token.
    """

    value: float
    byte: float
    flop: float
    moved: float


@cache
def latent_prices(workload: Workload, profile: HardwareProfile) -> LatentPrices:
    """Return the prices of a call on the slowest rank, in the workload's direction."""
    units = Latents(1, 0, 0, 0), Latents(0, 1, 0, 0), Latents(0, 0, 1, 0)
    seconds = [_seconds(workload, profile, x) for x in (*units, Latents(0, 0, 0, 1))]
    return LatentPrices(*seconds)


def _seconds(workload: Workload, profile: HardwareProfile, latents: Latents) -> float:
    own = replace(workload, latents=latents)
    values = numbers(own, CPDegrees(1, workload.ranks), profile)
    forward, backward = _compiled()(*(values[symbol] for symbol in SYMBOLS))
    sums = {
        Direction.FORWARD: forward,
        Direction.BACKWARD: backward,
        Direction.BOTH: forward + backward,
    }
    return sums[workload.direction]


@cache
def _compiled() -> Callable[..., list[float]]:
    return evaluator(SYMBOLS, (made_forward_seconds(), made_backward_seconds()))
