"""Seconds and bytes of every strategy on the slowest rank, as sympy expressions.

One function per strategy; each gives the costs of one pass, forward or backward. The
parts are in ring.py, all_gather.py, ulysses.py and compute.py, the symbols and their
numbers in symbols.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost import all_gather, latents, ring, split_kv, ulysses
from cpcompile.cost.compute import ring_step_seconds
from cpcompile.cost.symbols import SEVERAL, W_u, bias, larger, launch, parts, r, u
from cpcompile.geometry.layout import Layout


@dataclass(frozen=True)
class PassCost:
    """What one pass costs on the slowest rank.

    transfer: seconds of all communication; exposed: the part that adds to `seconds`.
    """

    seconds: sympy.Expr
    exposed: sympy.Expr
    transfer: sympy.Expr
    wire_bytes: sympy.Expr
    peak_extra_bytes: sympy.Expr
    kernels: sympy.Expr

    def then(self, backward: PassCost) -> PassCost:
        """Add a backward to this forward; `kernels` are the forward's."""
        return PassCost(
            seconds=self.seconds + backward.seconds,
            exposed=self.exposed + backward.exposed,
            transfer=self.transfer + backward.transfer,
            wire_bytes=self.wire_bytes + backward.wire_bytes,
            peak_extra_bytes=larger(self.peak_extra_bytes, backward.peak_extra_bytes),
            kernels=self.kernels,
        )

    def expressions(self) -> tuple[sympy.Expr, ...]:
        """Return the fields, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))


def ring_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of ring attention over all ranks: u = 1."""
    if backward:
        seconds = ring.ring_backward_seconds(causal, layout)
    else:
        seconds = ring.ring_forward_seconds(causal, layout)
    return PassCost(
        seconds=seconds,
        exposed=ring.ring_exposed_seconds(causal, layout, backward),
        transfer=ring.ring_transfer_seconds(backward),
        wire_bytes=ring.ring_wire_bytes(backward),
        peak_extra_bytes=ring.ring_peak_extra_bytes(backward),
        kernels=ring.ring_kernels(causal, layout),
    )


def all_gather_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-gather of keys and values: u = 1."""
    if backward:
        seconds = all_gather.all_gather_backward_seconds(causal, layout)
    else:
        seconds = all_gather.all_gather_forward_seconds(causal, layout)
    transfer = all_gather.all_gather_transfer_seconds(backward)
    return PassCost(
        seconds=seconds,
        exposed=transfer,
        transfer=transfer,
        wire_bytes=all_gather.all_gather_wire_bytes(backward),
        peak_extra_bytes=all_gather.all_gather_peak_extra_bytes(backward),
        kernels=all_gather.all_gather_kernels(causal, layout),
    )


def latents_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of keys that every rank makes of gathered latents: u = 1."""
    if backward:
        seconds = latents.latents_backward_seconds(causal, layout)
    else:
        seconds = latents.latents_forward_seconds(causal, layout)
    transfer = latents.latents_transfer_seconds(backward)
    return PassCost(
        seconds=seconds,
        exposed=transfer,
        transfer=transfer,
        wire_bytes=latents.latents_wire_bytes(backward),
        peak_extra_bytes=latents.latents_peak_extra_bytes(backward),
        kernels=all_gather.all_gather_kernels(causal, layout),
    )


def ulysses_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-to-all over all ranks and one kernel.

    Here r = 1, and no layout matters.
    """
    attention, _ = ring_step_seconds(causal, Layout.CONTIGUOUS, backward)
    transfer = ulysses.exchange_transfer_seconds() + _mask_wire_bytes(backward) / W_u
    # Gradients and the sum of dq, as in a ring of one; the forward sums in registers.
    summed = ring.ring_peak_extra_bytes(True) if backward else sympy.Integer(0)
    return PassCost(
        seconds=attention
        + ulysses.exchange_seconds(backward)
        + _mask_wire_bytes(backward) / W_u,
        exposed=transfer,
        transfer=transfer,
        wire_bytes=ulysses.exchange_wire_bytes() + _mask_wire_bytes(backward),
        peak_extra_bytes=_peak(summed, backward) + bias,
        kernels=sympy.Integer(1),
    )


def grouped_ulysses_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of Ulysses with several groups of heads, one after the other."""
    attention, _ = ring_step_seconds(causal, Layout.CONTIGUOUS, backward)
    attention += (parts - 1) * launch
    mask = _mask_wire_bytes(backward) / W_u
    exposed = ulysses.grouped_exposed_seconds(attention) + mask
    summed = ring.ring_peak_extra_bytes(True) if backward else sympy.Integer(0)
    return PassCost(
        seconds=attention + ulysses.grouped_copy_seconds(backward) + exposed,
        exposed=exposed,
        transfer=ulysses.grouped_transfer_seconds() + mask,
        wire_bytes=ulysses.exchange_wire_bytes() + _mask_wire_bytes(backward),
        peak_extra_bytes=ulysses.grouped_peak_extra_bytes(backward, summed) + bias,
        kernels=parts,
    )


def hybrid_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of an all-to-all over u ranks, and a ring over their r groups."""
    attention = ring_cost(causal, layout, backward)
    mask = _mask_wire_bytes(backward)
    transfer = ulysses.exchange_transfer_seconds() + mask / W_u
    return PassCost(
        seconds=attention.seconds + ulysses.exchange_seconds(backward) + mask / W_u,
        exposed=attention.exposed + transfer,
        transfer=attention.transfer + transfer,
        wire_bytes=attention.wire_bytes + ulysses.exchange_wire_bytes() + mask,
        peak_extra_bytes=_peak(attention.peak_extra_bytes, backward) + bias / r,
        kernels=attention.kernels,
    )


def split_kv_cost(causal: bool, layout: Layout, backward: bool) -> PassCost:
    """Return the cost of split keys: partial results are gathered; no backward."""
    transfer = split_kv.split_kv_transfer_seconds()
    return PassCost(
        seconds=split_kv.split_kv_seconds(),
        exposed=transfer,
        transfer=transfer,
        wire_bytes=split_kv.split_kv_wire_bytes(),
        peak_extra_bytes=split_kv.split_kv_peak_extra_bytes(),
        kernels=sympy.Integer(1),
    )


def _mask_wire_bytes(backward: bool) -> sympy.Expr:
    """Return the bytes of a mask tensor's rows that a rank sends; 0 in the backward.

    The forward gets them for the backward too.
    """
    return sympy.Integer(0) if backward else bias / r * (u - 1) / u


def _peak(attention: sympy.Expr, backward: bool) -> sympy.Expr:
    """Return the extra bytes of an attention between two exchanges."""
    during = ulysses.exchange_held_bytes(backward) + attention
    return larger(ulysses.exchange_peak_extra_bytes(backward), during)


def relayout_cost() -> tuple[sympy.Expr, sympy.Expr]:
    """Return (seconds, wire bytes) of making a layout for one pass, and undoing it."""
    return ulysses.relayout_seconds(), SEVERAL * ulysses.relayout_wire_bytes()
