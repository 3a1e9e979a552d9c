"""The operators with a mask, whose fields come behind all else in their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.ops.step.row_mask import MASK_FIELDS


def fields(*masks: Tensor | None) -> dict[str, Tensor | None]:
    """bias, key_ranges, q_segment_ids and kv_segment_ids as arguments."""
    return dict(zip(MASK_FIELDS, masks, strict=True))


def under_mask(strategy: str) -> Callable[..., Any]:
    """Its operator: q, k, v, the four fields of the mask, lengths, scale and group."""
    op = getattr(torch.ops.cp, f"{strategy}_attention")

    def call(*given: Any, **more: Any) -> Any:
        (
            q,
            k,
            v,
            bias,
            key_ranges,
            q_segment_ids,
            kv_segment_ids,
            q_len,
            kv_len,
            *rest,
        ) = given
        masks = fields(bias, key_ranges, q_segment_ids, kv_segment_ids)
        return op(q, k, v, q_len, kv_len, False, *rest, **masks, **more)

    return call
