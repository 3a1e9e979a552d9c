"""Attention of some rows on some keys under a mask: aten's kernel, or plain math.

Legend as in block_attention.py. A mask is additive, 0 or a bias where a row sees a key
and -inf where it does not, [B or 1, H or 1, R, K] in the dtype of q (math: in the
accumulation dtype); None hides nothing. The Triton templates take ranges instead, and
a softcap, dropout and a bias of positions with them, see masked_vectors.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel, masked_step_kernel
from cpcompile.ops.step.aten_flash import flash_backward, flash_forward, is_too_small
from cpcompile.ops.step.block_attention import (
    block_attention,
    block_attention_backward,
)
from cpcompile.ops.step.math_attention import accumulation_dtype, finite, group_rows
from cpcompile.ops.step.score_mod import ScorePart

HIDDEN = float("-inf")


def masked_kernel(
    q_BHRD: Tensor,
    v_BGKE: Tensor,
    bias: Tensor | None,
    changes: bool = False,
    table: bool = False,
) -> StepKernel:
    """Choose the kernel for such a call, see masked_step_kernel.

    changes, table: MaskOperands.are_changes and has_table.
    """
    return masked_step_kernel(
        q_BHRD.device.type,
        q_BHRD.dtype,
        q_BHRD.shape[-1],
        v_BGKE.shape[-1],
        None if bias is None else bias.dtype,
        changes,
        table,
    )


def mask_dtype(q: Tensor, kernel: StepKernel) -> torch.dtype:
    """Return the dtype in which `kernel` takes a mask."""
    return accumulation_dtype(q.dtype) if kernel is StepKernel.MATH else q.dtype


def masked_block(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    mask: Tensor | None,
    scale: float,
    kernel: StepKernel,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
    score_mod: ScorePart | None = None,
    triangular: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, R, E] and lse [B, H, R], as block_attention does, under a mask.

    dropout: what weights are multiplied by, [B, H, R, K]; the lse is without it. Rows
    that see none of the keys give 0 and -inf. triangular: as for a Block; such a call
    takes no mask, and nothing that plain math alone has.
    """
    if triangular:
        return block_attention(q_BHRD, k_BGKD, v_BGKE, True, scale, kernel)
    if kernel is StepKernel.MATH or is_too_small(q_BHRD, k_BGKD):
        B, H, R, _ = q_BHRD.shape
        scores = _scores(q_BHRD, k_BGKD, scale, softcap)
        scores = _masked(scores, mask, (B, H, R), score_mod)
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - finite(lse)).exp()
        if dropout is not None:
            weights.view(B, H, R, -1).mul_(dropout)
        out = weights @ v_BGKE.to(scores.dtype)
        out, lse = out.reshape(B, H, R, v_BGKE.shape[-1]), lse.reshape(B, H, R)
        return out.to(q_BHRD.dtype), lse
    if mask is None:
        return block_attention(q_BHRD, k_BGKD, v_BGKE, False, scale, kernel)
    out, lse = flash_forward(q_BHRD, k_BGKD, v_BGKE, False, scale, mask)
    # The kernel gives rows without a key the lse of a single key.
    return out, lse.masked_fill(mask.amax(-1) == HIDDEN, HIDDEN)


def masked_block_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    mask: Tensor | None,
    scale: float,
    kernel: StepKernel,
    triangular: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of these pairs, as block_attention_backward does.

    out and lse are the final ones of the rows; lse is `finite`, 0 where it was -inf.
    grad and out may have the column of Note [Gradient of the log-sum-exp].
    """
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR)
    if mask is None:
        return block_attention_backward(*operands, triangular, scale, kernel)
    return flash_backward(*operands, False, scale, mask)


def masked_math_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    delta_BHR: Tensor,
    lse_BHR: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    dropout: Tensor | None = None,
    score_mod: ScorePart | None = None,
    replaced: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and the mask's gradient [B, H, R, K], by matrix products.

    With a score_mod the last one is the gradient of its table instead. delta: see
    row_dots. replaced: given for rows whose scores the mask loses, bool [B or 1, H or
    1, R, K], where the mask stands in their place. Everything is in the accumulation
    dtype.
    """
    heads, (B, H, R, _) = k_BGKD.shape[1], q_BHRD.shape
    scores = _scores(q_BHRD, k_BGKD, scale, softcap)
    slope = 1 - (scores / softcap) ** 2 if softcap else None
    before = scores
    if replaced is not None:
        scores = torch.zeros_like(scores)
    scores = _masked(scores, mask, (B, H, R), score_mod)
    q, grad, lse, delta = (
        group_rows(x, heads).to(scores.dtype)
        for x in (q_BHRD, grad_BHRE, lse_BHR.unsqueeze(-1), delta_BHR.unsqueeze(-1))
    )
    p = (scores - lse).exp()
    dp, dropped = grad @ v_BGKE.to(scores.dtype).mT, p
    if dropout is not None:
        dp.view(B, H, R, -1).mul_(dropout)
        dropped = (p.view(B, H, R, -1) * dropout).view(p.shape)
    ds = p * (dp - delta)
    inner = ds if slope is None else ds * slope  # by tanh
    of_mask = ds.reshape(B, H, R, k_BGKD.shape[2])
    if score_mod is not None:
        inner, of_mask = score_mod.backward(before.view(of_mask.shape), of_mask)
        inner = inner.reshape(p.shape).masked_fill(p == 0, 0)  # it may be NaN there
    if replaced is not None:
        inner = inner.view(of_mask.shape).masked_fill(replaced, 0).view(p.shape)
    dq = (inner @ k_BGKD.to(ds.dtype) * scale).reshape(q_BHRD.shape)
    dk, dv = inner.mT @ q * scale, dropped.mT @ grad
    return dq, dk, dv, of_mask


def _scores(q_BHRD: Tensor, k_BGKD: Tensor, scale: float, softcap: float) -> Tensor:
    """Compute the scaled scores, [B, G, g * R, K] in the accumulation dtype."""
    dtype = accumulation_dtype(q_BHRD.dtype)
    heads = k_BGKD.shape[1]
    scores = group_rows(q_BHRD, heads).to(dtype) @ k_BGKD.to(dtype).mT * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(
    scores: Tensor,
    mask: Tensor | None,
    rows: tuple[int, int, int],
    score_mod: ScorePart | None,
) -> Tensor:
    """Mask the scores, in place unless there is a score_mod; rows: B, H and R."""
    own = scores.view(*rows, scores.shape[-1])
    if score_mod is None:
        if mask is not None:
            own.add_(mask)
        return scores
    own = score_mod.forward(own)
    if mask is not None:
        own = own.masked_fill(mask == HIDDEN, HIDDEN)  # NaN too
    return own.reshape(scores.shape)
