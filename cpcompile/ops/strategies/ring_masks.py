"""Additions to a ring under a mask: its summary, and where chunks go."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from cpcompile.geometry.known_masks import is_kept
from cpcompile.ops.attention_spec import is_of_positions
from cpcompile.ops.step.masked_ring_step import RingPlace, mask_summary
from cpcompile.ops.step.masked_steps import MaskSummary, mask_blocks
from cpcompile.ops.strategies.ring_schedule import Ring


@dataclass(frozen=True)
class RingMask:
    """Arguments of cp::attention_step_masked, which explains them."""

    extras: list[Tensor]
    summary: MaskSummary
    place: list[int]
    spec: str

    def of_source(self, source: int) -> tuple[Any, ...]:
        """Return extras, summary, place, source and spec for a step."""
        return self.extras, list(self.summary), self.place, source, self.spec


def under_mask(
    ring: Ring, q: Tensor, v: Tensor, bias_grad: bool = False
) -> tuple[Ring, RingMask | None]:
    """Return the ring with the offsets that its mask leaves, and the mask's arguments.

    These are None if it has no mask. q, v: of this rank. The mask is summarized here,
    once for all steps.
    """
    inputs = ring.inputs
    if not inputs.by_parts:
        return ring, None
    place = place_in(ring)
    numbers, (extras, spec) = place.to_list(), inputs.arguments()
    summary = MaskSummary(*mask_summary(q, v, extras, numbers, spec, bias_grad))
    if is_kept(inputs.spec.mask_key) or not is_fake(summary.table):
        blocks = mask_blocks(q, v, inputs, place.places, summary, bias_grad)
        ring = replace(ring, offsets=offsets_needed(blocks.needed))
    return ring, RingMask(extras, summary, numbers, spec)


def place_in(ring: Ring) -> RingPlace:
    """Return this rank's place, as steps under a mask take it."""
    return RingPlace(ring.queries, ring.keys, ring.inputs.spec.layout, ring.rank)


def offsets_needed(needed: tuple[tuple[bool, ...], ...]) -> tuple[int, ...]:
    """Return the offsets at which any rank sees keys, and 0.

    needed: by rank and source.
    """
    ranks = range(len(needed))
    seen = {(r - s) % len(needed) for r in ranks for s in ranks if needed[r][s]}
    return tuple(sorted(seen | {0}))


def gradient_of_bias(ring: Ring, parts: dict[int, Tensor]) -> Tensor:
    """Join the parts of the bias gradient, by source seen, to one like the bias."""
    bias = ring.inputs.bias
    assert bias is not None, "the gradient of a bias that is there"
    if is_of_positions(bias):
        return torch.stack([*parts.values()]).sum(0).to(bias.dtype)
    keys = place_in(ring).places.keys
    spans = [(x, s) for s, held in enumerate(keys) for x in held]
    columns = [
        parts[source].narrow(3, span.place, span.count)
        if source in parts
        else bias.new_zeros((*bias.shape[:3], span.count))
        for span, source in sorted(spans, key=lambda each: each[0].position)
    ]
    return torch.cat(columns, 3) if columns else torch.zeros_like(bias)
