"""A column of sinks: a learned score per head that takes weight and has no value.

    weights = softmax(cat([scores, sinks], keys));  out = weights without the last @ v

It changes the log-sum-exp of a row and scales its result, so that it is added when all
keys are done. With these as out and lse the backward of the keys stays what it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.ops.step.block_attention import row_dots


def with_sinks(
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    sinks_H: Tensor | None,
    row_shift_BHR1: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the sinks to out and lse; rows that see no key, of lse -inf, give 0.

    row_shift: what scores were shifted by, Note [Rows of low numbers]; sinks are, too.
    B or H may be 1. None and an empty one shift nothing.

    Raises: ValueError for sinks that are not one number per head.
    """
    if sinks_H is None:
        return out_BHRE, lse_BHR
    if sinks_H.shape != lse_BHR.shape[1:2]:
        raise ValueError(
            f"attention of {lse_BHR.shape[1]} heads: got sinks {tuple(sinks_H.shape)}; "
            f"needed [{lse_BHR.shape[1]}], one number per head"
        )
    sinks = sinks_H.to(lse_BHR.dtype)[:, None]
    if row_shift_BHR1 is not None and row_shift_BHR1.numel():
        sinks = sinks - row_shift_BHR1.squeeze(-1).to(sinks.dtype)
    weight = torch.sigmoid(lse_BHR - sinks).unsqueeze(-1)
    out = (out_BHRE * weight).to(out_BHRE.dtype)
    return out, torch.logaddexp(lse_BHR, sinks.expand_as(lse_BHR))


def gradient_of_sinks(
    grad_BHRE: Tensor,
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    sinks_H: Tensor,
    grad_lse_BHR: Tensor | None = None,
) -> Tensor:
    """Compute the gradient [H], summed over rows, given out and lse of `with_sinks`."""
    weight = torch.exp(sinks_H.to(lse_BHR.dtype)[:, None] - lse_BHR)
    delta = row_dots(grad_BHRE, out_BHRE, grad_lse_BHR)
    return -(weight * delta).sum((0, 2)).to(sinks_H.dtype)
