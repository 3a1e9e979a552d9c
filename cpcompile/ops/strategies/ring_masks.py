"""Additions to a ring under a mask: one look at the mask, and where chunks go."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from cpcompile.geometry.known_masks import is_kept
from cpcompile.ops.step.masked_ring_step import RingPlace, look_at_mask
from cpcompile.ops.step.masked_steps import MaskSummary, mask_blocks
from cpcompile.ops.step.position_bias import is_of_positions
from cpcompile.ops.strategies.ring_schedule import Ring


class RingMask(NamedTuple):
    """Arguments of cp::attention_step_masked, which explains them."""

    masks: list[Tensor | None]
    known: str
    seen: list[Tensor]
    place: list[int]


def under_mask(
    ring: Ring, q: Tensor, v: Tensor, bias_grad: bool = False
) -> tuple[Ring, RingMask | None]:
    """Return the ring with the offsets that its mask leaves, and the mask's arguments.

    These are None if it has no mask. q, v: of this rank. The mask is looked at here,
    once for all steps.
    """
    if not ring.masks.are_given:
        return ring, None
    *masks, known = ring.masks[:5]
    softcap, dropout_p, _, score_mod = ring.masks.changes
    place = RingPlace(ring.queries, ring.keys, ring.layout, ring.rank)
    numbers = place.to_list()
    changes = (softcap, dropout_p, score_mod)
    seen = list(look_at_mask(q, v, masks, known, numbers, bias_grad, *changes))
    look = MaskSummary(*seen)
    if is_kept(known) or not is_fake(look.table):
        blocks = mask_blocks(q, v, ring.masks, place.places, look, bias_grad)
        ring = replace(ring, offsets=offsets_needed(blocks.needed))
    return ring, RingMask(masks, known, seen, numbers)


def offsets_needed(needed: tuple[tuple[bool, ...], ...]) -> tuple[int, ...]:
    """Return the offsets at which any rank sees keys, and 0.

    needed: by rank and source.
    """
    ranks = range(len(needed))
    seen = {(r - s) % len(needed) for r in ranks for s in ranks if needed[r][s]}
    return tuple(sorted(seen | {0}))


def gradient_of_bias(ring: Ring, parts: dict[int, Tensor]) -> Tensor:
    """Join the parts of the bias gradient, by source seen, to one like the bias."""
    bias = ring.masks.bias
    assert bias is not None, "the gradient of a bias that is there"
    if is_of_positions(bias):
        return torch.stack([*parts.values()]).sum(0).to(bias.dtype)
    place = RingPlace(ring.queries, ring.keys, ring.layout, ring.rank)
    spans = [(x, s) for s, held in enumerate(place.places.keys) for x in held]
    columns = [
        parts[source].narrow(3, span.place, span.count)
        if source in parts
        else bias.new_zeros((*bias.shape[:3], span.count))
        for span, source in sorted(spans, key=lambda each: each[0].position)
    ]
    return torch.cat(columns, 3) if columns else torch.zeros_like(bias)
