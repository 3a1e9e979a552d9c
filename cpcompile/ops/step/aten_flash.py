"""Calls of aten's flash attention of the device, for steps of attention.

Legend as in block_attention.py. A mask is additive, [B or 1, H or 1, R, K] in the dtype
of q, and for the CPU only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cpcompile.kernels.operands import flash_operand
from cpcompile.ops.step.math_attention import accumulation_dtype

aten = torch.ops.aten

_VECTOR = 16  # float32 numbers in the longest vector register of a CPU


def is_empty(q_BHRD: Tensor, k_BGKD: Tensor) -> bool:
    """Tell whether no query meets a key, for which aten's kernel must not be called.

    Its CPU kernel divides by the number of heads. There is no error then: the process
    ends. Seen in torch 2.13.
    """
    return 0 in (*q_BHRD.shape[:3], k_BGKD.shape[2])


def is_too_small(q_BHRD: Tensor, k_BGKD: Tensor) -> bool:
    """Tell whether plain math has to compute it in place of flash_forward.

    With fewer keys than a vector register holds, aten's CPU kernel takes a row of
    scores that are all NaN for one without a key, and gives 0; seen in torch 2.13.
    """
    few = q_BHRD.device.type == "cpu" and k_BGKD.shape[2] < _VECTOR
    return few or is_empty(q_BHRD, k_BGKD)


def flash_forward(
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return out [B, H, R, E] in q's dtype and lse [B, H, R] in float32."""
    value_dim = v_BGKE.shape[-1]
    q_BHRD, k_BGKD, v_BGKE = flash_operands(q_BHRD, k_BGKD, v_BGKE)
    if q_BHRD.device.type == "cpu":
        out_BHRD, lse_BHR = aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHRD, k_BGKD, v_BGKE, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    else:
        assert mask is None, "aten's flash attention takes a mask on a CPU only"
        out_BHRD, lse_BHR, *_ = aten._scaled_dot_product_flash_attention(
            q_BHRD, k_BGKD, v_BGKE, 0.0, is_causal, False, scale=scale
        )
    if out_BHRD.shape[-1] > value_dim:
        out_BHRD = out_BHRD.narrow(-1, 0, value_dim)
    return out_BHRD, lse_BHR


def flash_backward(
    grad_BHRE: Tensor,
    q_BHRD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    out_BHRE: Tensor,
    lse_BHR: Tensor,
    is_causal: bool,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B, H, R, D], dk [B, G, K, D] and dv [B, G, K, E].

    They are in q's dtype; in the accumulation dtype on a CPU if query heads share a key
    head: there the kernel rounds the dk and dv of every query head before it sums
    these. grad and out may have the column of Note [Gradient of the log-sum-exp].
    """
    if is_empty(q_BHRD, k_BGKD):
        zeros = (torch.zeros_like(x) for x in (q_BHRD, k_BGKD, v_BGKE))
        dq, dk, dv = zeros
        return dq, dk, dv
    head_dim, value_dim = q_BHRD.shape[-1], v_BGKE.shape[-1]
    columns = grad_BHRE.shape[-1]
    if columns > value_dim:
        v_BGKE = F.pad(v_BGKE, (0, columns - value_dim))
    q_BHRD, k_BGKD, v_BGKE = flash_operands(q_BHRD, k_BGKD, v_BGKE)
    pad = v_BGKE.shape[-1] - columns
    grad_BHRE, out_BHRE = (
        flash_operand(F.pad(x, (0, pad)) if pad else x) for x in (grad_BHRE, out_BHRE)
    )
    lse_BHR = lse_BHR.contiguous()
    operands = (grad_BHRE, q_BHRD, k_BGKD, v_BGKE, out_BHRE, lse_BHR)
    if q_BHRD.device.type == "cpu":
        dtype = q_BHRD.dtype
        if q_BHRD.shape[1] != k_BGKD.shape[1]:
            dtype = accumulation_dtype(dtype)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(x.to(dtype) for x in operands[:-1]),
            lse_BHR,
            0.0,
            is_causal,
            attn_mask=None if mask is None else mask.to(dtype),
            scale=scale,
        )
    else:
        assert mask is None, "aten's flash attention takes a mask on a CPU only"
        rows, keys = q_BHRD.shape[2], k_BGKD.shape[2]
        unused = torch.empty((), dtype=torch.int64, device=q_BHRD.device)  # dropout's
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            *operands,
            None,
            None,
            rows,
            keys,
            0.0,
            is_causal,
            unused,
            unused,
            scale=scale,
        )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def flash_operands(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give q, k and v one head dim, as kernels need; Note [What kernels rely on].

    On a GPU the size is a multiple of 8. Padding with zeros changes neither the scores
    nor the first columns of the outputs.
    """
    dim = max(q.shape[-1], v.shape[-1], 1)
    if q.device.type != "cpu":
        dim = -(-dim // 8) * 8
    q, k, v = (
        flash_operand(F.pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x)
        for x in (q, k, v)
    )
    return q, k, v
