"""The operators with a mask, whose fields are tensors in the place of keywords."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cpcompile.ops.attention_spec import MASK_FIELDS
from tests.support.attention_calls import attention


def fields(*masks: Tensor | None) -> dict[str, Tensor | None]:
    """bias, key_ranges, q_segment_ids and kv_segment_ids as arguments."""
    return dict(zip(MASK_FIELDS, masks, strict=True))


def under_mask(strategy: str) -> Callable[..., Any]:
    """Its operator: q, k, v, the four fields of the mask, lengths, scale and groups."""
    call = attention(strategy)

    def masked(q: Any, k: Any, v: Any, *given: Any, **more: Any) -> Any:
        masks, (q_len, kv_len, *others) = fields(*given[:4]), given[4:]
        return call(q, k, v, q_len, kv_len, False, *others, **masks, **more)

    return masked
