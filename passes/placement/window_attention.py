"""Attention of batch entries that ranks share out, such as windows of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.shares import sharing_rows


def cp_window_attention(
    q: DTensor,
    k: DTensor,
    v: DTensor,
    mask: DTensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> DTensor:
    """Attend in the batch entries of this rank, with any kernel of torch.

    DTensor's own attention gathers entries if a mask needs a gradient, or if ranks have
    parts of each sample.

    Args:
        q, k, v: [B, .., S, D], all split along B in the same way, and along nothing
            else.
        mask: split so, or the same for all entries. Its gradient is a sum over ranks
            then.
        is_causal, scale, enable_gqa: as torch takes them.
    """
    own = None
    if mask is not None:
        grads: list[Placement] = [
            Partial() if m.is_replicate() and not p.is_replicate() else m
            for m, p in zip(mask.placements, q.placements, strict=True)
        ]
        own = local_part(mask, grads)
    query, key, value = local_part(q), local_part(k), local_part(v)
    with sharing_rows(q.device_mesh, q.placements, q.numel(), query.numel()):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=own,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    return dtensor_of(out.contiguous(), q.device_mesh, q.placements, shape)
