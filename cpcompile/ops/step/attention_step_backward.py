"""The backward of cp::attention_step, in two forms.

Arguments, and what `after` is for, are in attention_step.py.

Note [Two forms of the backward]
The Triton kernels have one backward for dK and dV and one for dQ, so that dK and dV
travel while dQ is computed. aten's kernels give all three at once; to run them twice
would double the work, so they have a form of their own, attention_step_backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.attention_step import blocks_of, hidden_keys
from cpcompile.ops.step.block_attention import (
    block_attention_backward,
    row_dots,
    take_keys,
    take_rows,
    without_column,
)
from cpcompile.ops.step.math_attention import (
    accumulation_dtype,
    additive,
    math_backward,
)


@torch.library.custom_op("cp::attention_step_dkdv", mutates_args=())
def attention_step_dkdv(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    upper_rows: Tensor | None,
    lower_rows: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    upper: Sequence[int],
    lower: Sequence[int],
    scale: float,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add what the local queries contribute to the gradients of a chunk, dk and dv.

    Args:
        grad: [B, H, R, E], the gradient of out.
        lse: [B, H, R], of all steps, so that exp(score - lse) is the probability.
        delta: [B, H, R], grad . out per row, in the accumulation dtype.
        dk, dv: [B, G, K, D] and [B, G, K, E] so far, in the accumulation dtype; or
            None.
        The others are those of cp::attention_step.

    Returns: dk and dv, in k's dtype if `final`.
    """
    visible = Visible.of_lists(rows, keys, upper, lower)
    if StepKernel(kernel) is StepKernel.TEMPLATE:
        from cpcompile.kernels import launch  # imports triton

        return launch.dkdv(
            grad,
            q,
            k,
            v,
            lse,
            delta,
            dk,
            dv,
            upper_rows,
            lower_rows,
            visible,
            scale,
            final,
        )
    hidden = hidden_keys(q, k, upper_rows, lower_rows, visible)
    saved = (grad, q, k, v, lse, delta)
    _, dk_new, dv_new, _ = math_backward(*saved, additive(hidden, q), scale)
    if dk is not None and dv is not None:
        dk_new, dv_new = dk_new + dk, dv_new + dv
    return (dk_new.to(k.dtype), dv_new.to(v.dtype)) if final else (dk_new, dv_new)


@attention_step_dkdv.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    final = rest[11]
    dtype = k.dtype if final else accumulation_dtype(k.dtype)
    return k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)


@torch.library.custom_op("cp::attention_step_dq", mutates_args=())
def attention_step_dq(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor | None,
    upper_rows: Tensor | None,
    lower_rows: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    upper: Sequence[int],
    lower: Sequence[int],
    scale: float,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> Tensor:
    """Add what one chunk contributes to the gradient of the local queries.

    The gradient is dq [B, H, R, D]; arguments and result are like those of
    cp::attention_step_dkdv.
    """
    visible = Visible.of_lists(rows, keys, upper, lower)
    if StepKernel(kernel) is StepKernel.TEMPLATE:
        from cpcompile.kernels import launch  # imports triton

        return launch.dq(
            grad,
            q,
            k,
            v,
            lse,
            delta,
            dq,
            upper_rows,
            lower_rows,
            visible,
            scale,
            final,
        )
    hidden = hidden_keys(q, k, upper_rows, lower_rows, visible)
    saved = (grad, q, k, v, lse, delta)
    dq_new, *_ = math_backward(*saved, additive(hidden, q), scale)
    if dq is not None:
        dq_new = dq_new + dq
    return dq_new.to(q.dtype) if final else dq_new


@attention_step_dq.register_fake
def _(grad: Tensor, q: Tensor, *rest: Any) -> Tensor:
    final = rest[12]
    return q.new_empty(q.shape, dtype=q.dtype if final else accumulation_dtype(q.dtype))


@torch.library.custom_op("cp::attention_step_backward", mutates_args=())
def attention_step_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    rows: Sequence[int],
    keys: Sequence[int],
    upper: Sequence[int],
    lower: Sequence[int],
    scale: float,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute all gradients of a step by aten; Note [Two forms of the backward].

    Args:
        grad, out, lse: [B, H, R, E] and [B, H, R], of all steps; grad and out may have
            the column of Note [Gradient of the log-sum-exp].
        dq: [B, H, R, D] so far, in the accumulation dtype, or None.
        The others are those of cp::attention_step.

    Returns: dq including the argument (in q's dtype if `final`), and this step's part
    of dk and dv, in the accumulation dtype.
    """
    visible = Visible.of_lists(rows, keys, upper, lower)
    which = StepKernel(kernel)
    dtype = accumulation_dtype(q.dtype)
    blocks = blocks_of(q, k, None, None, visible, which)
    if blocks is None:
        hidden = hidden_keys(q, k, None, None, visible)
        saved = (without_column(grad, v), q, k, v, lse, row_dots(grad, out))
        dq_new, dk, dv, _ = math_backward(*saved, additive(hidden, q), scale)
        total = dq_new if dq is None else dq_new + dq
        return (total.to(q.dtype) if final else total), dk, dv
    total = q.new_zeros(q.shape, dtype=dtype)
    if dq is not None:
        total.copy_(dq)  # a clone would keep the strides of dq
    dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
    for block in blocks:
        parts = block_attention_backward(
            take_rows(grad, block),
            take_rows(q, block),
            take_keys(k, block),
            take_keys(v, block),
            take_rows(out, block),
            take_rows(lse, block),
            block.triangular,
            scale,
            which,
        )
        take_rows(total, block).add_(parts[0])
        take_keys(dk, block).add_(parts[1])
        take_keys(dv, block).add_(parts[2])
    return (total.to(q.dtype) if final else total), dk, dv


@attention_step_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    final = rest[8]
    dtype = accumulation_dtype(q.dtype)
    return (
        q.new_empty(q.shape, dtype=q.dtype if final else dtype),
        k.new_empty(k.shape, dtype=dtype),
        v.new_empty(v.shape, dtype=dtype),
    )
