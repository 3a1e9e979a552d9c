"""Additions to a ring under a mask: its summary, and where chunks go."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cpcompile.geometry.mask_cache import is_cached
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import is_of_positions
from cpcompile.ops.step.mask_summary import mask_summary
from cpcompile.ops.step.rows_under_mask import MaskedRows, MaskSummary
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.torch_private.fake_tensors import is_fake


def under_mask(
    ring: Ring, q: Tensor, kernel: StepKernel, bias_grad: bool = False
) -> Ring:
    """Return the ring with the summary of its mask, and the offsets that it leaves.

    A ring without a mask stays what it is. q: of this rank. The mask is summarized
    here, once for all steps by `kernel`.
    """
    inputs = ring.inputs
    if not inputs.has_modifiers:
        return ring
    place = ring.rank_place()
    rows = MaskedRows(q, inputs, place.spans, kernel, bias_grad)
    if ring.is_plain(q):
        return replace(ring, summary=rows.summarize())
    extras, spec = inputs.arguments()
    how = (place.to_list(), spec, bias_grad, kernel.value)
    summary = MaskSummary(*mask_summary(q, extras, *how))
    known = is_cached(inputs.spec.mask_key) or not is_fake(summary.table)
    if known and ring.ranks > 1:
        offsets = offsets_needed(rows.blocks(summary).needed)
        ring = replace(ring, offsets=offsets)
    return replace(ring, summary=summary)


def offsets_needed(needed: tuple[tuple[bool, ...], ...]) -> tuple[int, ...]:
    """Return the offsets at which any rank sees keys, and 0.

    needed: by rank and source.
    """
    ranks = range(len(needed))
    offsets = {(r - s) % len(needed) for r in ranks for s in ranks if needed[r][s]}
    return tuple(sorted(offsets | {0}))


def gradient_of_bias(ring: Ring, parts: dict[int, Tensor]) -> Tensor:
    """Join the parts of the bias gradient, by source seen, to one like the bias."""
    bias = ring.inputs.bias
    assert bias is not None, "the gradient of a bias that is there"
    if is_of_positions(bias):
        return torch.stack([*parts.values()]).sum(0).to(bias.dtype)
    keys = ring.rank_place().spans.keys
    spans = [(x, source) for source, held in enumerate(keys) for x in held]
    columns = [
        parts[source].narrow(3, span.place, span.count)
        if source in parts
        else bias.new_zeros((*bias.shape[:3], span.count))
        for span, source in sorted(spans, key=lambda x: x[0].position)
    ]
    if len(columns) == 1:
        return columns[0].contiguous()
    return torch.cat(columns, 3) if columns else torch.zeros_like(bias)
