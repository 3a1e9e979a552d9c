"""Attention of some query rows on one block of keys: aten's kernels, or plain math.

The Triton templates take whole chunks instead, see template_steps.py.

Legend: B batch, H query heads, G key/value heads (H a multiple of G, query head h reads
key head h // (H // G)), R query rows, K keys, D head dim of q and k, E head dim of v.
Key and value heads are never repeated.

Note [Gradient of the log-sum-exp]
Where the lse of a row has a gradient g, delta, which is grad . out of the row, becomes
delta - g in the gradient of its scores, p * (grad . v - delta). Kernels that compute
delta themselves are given it by one more column: -g in grad, 1 in out, and 0 in v.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.aten_flash import flash_forward, is_too_small
from cpcompile.ops.step.math_attention import (
    HIDDEN,
    accumulation_dtype,
    additive,
    hidden_above_diagonal,
    math_forward,
)
from cpcompile.ops.step.score_mod import BlockScoreMod


def block_attention(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    triangular: bool,
    scale: float,
    kernel: StepKernel,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
    score_mod: BlockScoreMod | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention of one block.

    Returns out [B, H, R, E] in q's dtype, normalised over the keys of this block, and
    the log-sum-exp of the scaled scores, [B, H, R] in the accumulation dtype. There
    must be at least one row and one key. Rows that see none of the keys give 0 and
    -inf. What follows `mask` plain math alone has, see math_forward.

    mask: 0 or a bias where a row sees a key and -inf where it does not, [B or 1, H or
        1, R, K] in `mask_dtype`. A triangular block takes none.
    """
    if kernel is StepKernel.MATH or is_too_small(q_BHRD, k_BGKD):
        if triangular:
            mask = above_diagonal(q_BHRD, k_BGKD)
        changes = (softcap, dropout, score_mod)
        out, lse = math_forward(q_BHRD, k_BGKD, v_BGKE, mask, scale, *changes)
        return out.to(q_BHRD.dtype), lse
    out, lse = flash_forward(q_BHRD, k_BGKD, v_BGKE, triangular, scale, mask)
    if mask is None:
        return out, lse
    # The kernel gives rows without a key the lse of a single key.
    return out, lse.masked_fill(mask.amax(-1) == HIDDEN, HIDDEN)


def mask_dtype(q: Tensor, kernel: StepKernel) -> torch.dtype:
    """Return the dtype in which `kernel` takes a mask."""
    return accumulation_dtype(q.dtype) if kernel is StepKernel.MATH else q.dtype


def row_dots(
    grad_BHRE: Tensor, out_BHRE: Tensor, grad_lse_BHR: Tensor | None = None
) -> Tensor:
    """Compute delta, [B, H, R] in the accumulation dtype: grad . out per row.

    The gradient of the lse is subtracted, see Note [Gradient of the log-sum-exp].
    """
    dtype = accumulation_dtype(grad_BHRE.dtype)
    dots = (grad_BHRE.to(dtype) * out_BHRE.to(dtype)).sum(-1)
    return dots if grad_lse_BHR is None else dots - grad_lse_BHR


def with_column(
    grad_BHRE: Tensor, out_BHRE: Tensor, grad_lse_BHR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return grad and out with the column of Note [Gradient of the log-sum-exp]."""
    if grad_lse_BHR is None:
        return grad_BHRE, out_BHRE
    column = -grad_lse_BHR.to(grad_BHRE.dtype).unsqueeze(-1)
    ones = torch.ones_like(column, dtype=out_BHRE.dtype)
    return torch.cat([grad_BHRE, column], -1), torch.cat([out_BHRE, ones], -1)


def without_column(grad_BHRE: Tensor, v_BGKE: Tensor) -> Tensor:
    """Return the gradient of out alone; undo `with_column`."""
    if grad_BHRE.shape[-1] == v_BGKE.shape[-1]:
        return grad_BHRE
    return grad_BHRE[..., : v_BGKE.shape[-1]].contiguous()


def rows_of(x: Tensor, block: Block) -> Tensor:
    """View the query rows of `block`; x is [B, H, rows, ...]."""
    return _view(x, block.row, block.rows, block.step)


def keys_of(x: Tensor, block: Block) -> Tensor:
    """View the keys of `block`; x is [B, G, keys, ...]."""
    return _view(x, block.key, block.keys, block.step)


def _view(x: Tensor, start: int, count: int, step: int) -> Tensor:
    view = x.narrow(2, start, (count - 1) * step + 1)
    return view if step == 1 else view[:, :, ::step]


def above_diagonal(q_BHRD: Tensor, k_BGKD: Tensor) -> Tensor | None:
    """Return the mask of a triangular block."""
    sides = q_BHRD.shape[2], k_BGKD.shape[2]
    return additive(hidden_above_diagonal(*sides, q_BHRD.device), q_BHRD)
