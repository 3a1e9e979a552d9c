"""The backward of cp::attention_step, in two forms.

Arguments, and what `after` is for, are in attention_step.py.

Note [Two forms of the backward]
The Triton kernels have one backward for dK and dV and one for dQ, so that dK and dV
travel while dQ is computed. aten's kernels give all three at once; to run them twice
would double the work, so they have a form of their own, attention_step_backward. It is
that of steps under a mask, too, whatever the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.row_gradients import RowGradients, SavedRows
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.step_arguments import (
    ChunkMask,
    StepArguments,
    fake_by_name,
    fake_sum,
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
    extras: Sequence[Tensor],
    seen: Sequence[Tensor],
    limits: Sequence[int],
    spec: str,
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
    work = _split_work(q, k, StepArguments(extras, seen, limits, spec), kernel)
    if work.templates is not None:
        return work.templates.dkdv((grad, q, lse, delta), k, v, dk, dv, final)
    saved = SavedRows(grad, q, lse, delta=delta)
    dk_new, dv_new = RowGradients(work, saved).of_chunk(k, v)
    if dk is not None and dv is not None:
        dk_new, dv_new = dk_new + dk, dv_new + dv
    return (dk_new.to(k.dtype), dv_new.to(v.dtype)) if final else (dk_new, dv_new)


@torch.library.custom_op("cp::attention_step_dq", mutates_args=())
def attention_step_dq(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor | None,
    extras: Sequence[Tensor],
    seen: Sequence[Tensor],
    limits: Sequence[int],
    spec: str,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> Tensor:
    """Add what one chunk contributes to the gradient of the local queries.

    The gradient is dq [B, H, R, D]; arguments and result are like those of
    cp::attention_step_dkdv.
    """
    work = _split_work(q, k, StepArguments(extras, seen, limits, spec), kernel)
    if work.templates is not None:
        return work.templates.dq((grad, q, lse, delta), k, v, dq, final)
    gradients = RowGradients(work, SavedRows(grad, q, lse, delta=delta), dq)
    gradients.of_chunk(k, v)
    return gradients.dq.to(q.dtype) if final else gradients.dq


@torch.library.custom_op("cp::attention_step_backward", mutates_args=())
def attention_step_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dq: Tensor | None,
    extras: Sequence[Tensor],
    seen: Sequence[Tensor],
    limits: Sequence[int],
    spec: str,
    bias_grad: bool,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute all gradients of a step; Note [Two forms of the backward].

    Args:
        grad, out, lse: [B, H, R, E] and [B, H, R], of all steps; grad and out may have
            the column of Note [Gradient of the log-sum-exp].
        dq: [B, H, R, D] so far, in the accumulation dtype, or None.
        bias_grad: whether the gradient of the bias is wanted.
        The others are those of cp::attention_step.

    Returns: dq including the argument (in q's dtype if `final`); this step's part of dk
    and dv, in the accumulation dtype; and the gradient of the bias for the keys of the
    chunk, without padding, [B or 1, H or 1, R, keys], or without elements. The gradient
    of a bias of positions is whole, in the accumulation dtype.
    """
    chunk = StepArguments(extras, seen, limits, spec).read()
    work = chunk.work(q, k, StepKernel(kernel), bias_grad)
    saved = SavedRows(grad, q, lse, out)
    gradients = RowGradients(work, saved, dq, bias_grad)
    dk, dv = gradients.of_chunk(k, v)
    total = gradients.dq.to(q.dtype) if final else gradients.dq
    dbias = q.new_empty((0, 0, 0, 0))
    if bias_grad and isinstance(chunk, ChunkMask):
        dbias = chunk.own_columns(gradients.dbias)
    return total, dk, dv, dbias


def _split_work(q: Tensor, k: Tensor, arguments: StepArguments, kernel: str) -> RowWork:
    """Return the work of one of two backwards: by the templates, or by plain math."""
    which = StepKernel(kernel)
    chunk = arguments.read()
    return chunk.work(q, k, which if which is StepKernel.TEMPLATE else StepKernel.MATH)


def _fake_dkdv(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    k, v = (fake_sum(arguments[name], arguments["final"]) for name in ("k", "v"))
    return k, v


def _fake_dq(arguments: Mapping[str, Any]) -> Tensor:
    return fake_sum(arguments["q"], arguments["final"])


def _fake_backward(
    arguments: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = arguments["q"]
    dk, dv = (fake_sum(arguments[name], False) for name in ("k", "v"))
    dbias = q.new_empty((0, 0, 0, 0))
    if arguments["bias_grad"]:
        names = StepArguments._fields
        chunk = StepArguments(*(arguments[name] for name in names)).read()
        if isinstance(chunk, ChunkMask):
            dbias = chunk.fake_columns(q)
    return fake_sum(q, arguments["final"]), dk, dv, dbias


fake_by_name(attention_step_dkdv, _fake_dkdv)
fake_by_name(attention_step_dq, _fake_dq)
fake_by_name(attention_step_backward, _fake_backward)
