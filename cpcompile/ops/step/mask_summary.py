"""cp::mask_summary: a mask is summarized once, for all steps of a ring.

Each step then computes what the mask leaves of one chunk. Which tokens lie where
arrives as integers, see RingPlace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.row_mask import may_be_shifted
from cpcompile.ops.step.rows_under_mask import MaskedRows
from cpcompile.ops.step.step_arguments import RingPlace


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
