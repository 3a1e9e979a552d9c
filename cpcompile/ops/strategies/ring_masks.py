"""Additions to a ring under a mask: its summary, and where chunks go.

cp::mask_summary summarizes a mask once, for all steps of a ring. Each step then
computes what the mask leaves of one chunk. Which tokens lie where arrives as integers,
see RingPlace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.mask_cache import is_cached
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs, is_of_positions
from cpcompile.ops.step.row_mask import may_be_shifted
from cpcompile.ops.step.rows_under_mask import MaskedRows, MaskSummary
from cpcompile.ops.step.step_arguments import RingPlace
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


@torch.library.custom_op("cp::mask_summary", mutates_args=())
def mask_summary(
    q: Tensor,
    extras: Sequence[Tensor],
    place: Sequence[int],
    spec: str,
    bias_grad: bool,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of a MaskSummary.

    Args:
        q: of the ring; its values are not read.
        extras, spec: of cp::ring_attention.
        place: a RingPlace as integers, of any source.
        bias_grad: whether the backward wants the gradient of the bias.
        kernel: that of the steps.
    """
    rows = _rows(q, extras, place, spec, bias_grad, kernel)
    lower, upper, table, row_shift = rows.summarize()
    return lower, upper, table, row_shift


@mask_summary.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = _rows(q, *rest)
    inputs = rows.inputs
    batch = max(1 if x is None else x.shape[0] for x in inputs.masks[1:])
    bound = q.new_empty((batch, q.shape[2]), dtype=torch.int64)
    size = 0 if inputs.spec.mask_key else rows.cut.summary_size
    row_shift, added = q.new_empty(0), inputs.added
    if added is not None and may_be_shifted(added):
        copies = (*added.shape[:2], q.shape[2])
        shape = torch.broadcast_shapes(copies, (batch, 1, 1))
        row_shift = added.new_empty((*shape, 1))
    table = torch.empty(size, dtype=torch.int64, device="cpu")
    return bound, torch.empty_like(bound), table, row_shift


def _rows(q: Tensor, *rest: Any) -> MaskedRows:
    extras, place, spec, bias_grad, kernel = rest
    inputs, ring = AttentionInputs.of(spec, extras), RingPlace.of_list(place)
    return MaskedRows(q, inputs, ring.spans, StepKernel(kernel), bias_grad)
