"""The backward of cp::attention_step, whole or in two parts.

Arguments, and what `after` is for, are in attention_step.py.

Note [Two forms of the backward]
The Triton kernels have one backward for dK and dV and one for dQ, so that dK and dV
travel while dQ is computed. aten's kernels give all three at once; to run them twice
would double the work, so these are one call. So are steps under a mask, whatever the
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.step.row_gradients import RowGradients, SavedRows
from cpcompile.ops.step.step_arguments import (
    StepArguments,
    StepChunk,
    fake_by_name,
    fake_sum,
)


class Parts(Enum):
    """Which gradients a call computes; Note [Two forms of the backward]."""

    DKDV = "dkdv"
    DQ = "dq"
    ALL = "all"
    ALL_AND_BIAS = "all, dbias"


@torch.library.custom_op("cp::attention_step_backward", mutates_args=())
def attention_step_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    rows: Tensor,
    sums: Sequence[Tensor],
    parts: str,
    extras: Sequence[Tensor],
    summary: Sequence[Tensor],
    upper: Tensor | None,
    visible: Sequence[int],
    place: Sequence[int],
    spec: str,
    final: bool,
    kernel: str,
    after: Tensor | None = None,
) -> list[Tensor]:
    """Compute gradients of a step, and add them to those of earlier steps.

    Args:
        grad: [B, H, R, E], the gradient of out.
        lse: [B, H, R], of all steps, so that exp(score - lse) is the probability.
        rows: [B, H, R], grad . out per row, in the accumulation dtype, for some of the
            gradients. For all of them out [B, H, R, E] of all steps; grad and out may
            then have the column of Note [Gradient of the log-sum-exp].
        sums: in the accumulation dtype what the earlier steps gave: dk and dv; or dq,
            which is the one that is added to if all are computed. Empty before.
        parts: value of Parts.
        The others are those of cp::attention_step.

    Returns: [dk, dv], or [dq], in k's and q's dtype if `final`. Or all: [dq, dk, dv],
    where dk and dv are this step's alone, in the accumulation dtype; and the gradient
    of the bias for the keys of the chunk, without padding, [B or 1, H or 1, R, keys].
    That of a bias of positions is whole, in the accumulation dtype.
    """
    chunk = StepArguments(extras, summary, upper, visible, place, spec).read()
    saved = (grad, q, k, v, lse, rows, sums)
    return step_backward(*saved, Parts(parts), chunk, final, StepKernel(kernel))


def step_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    rows: Tensor,
    sums: Sequence[Tensor],
    parts: Parts,
    chunk: StepChunk,
    final: bool,
    kernel: StepKernel,
) -> list[Tensor]:
    """Do what cp::attention_step_backward does."""
    dq_before = None if parts is Parts.DKDV or not sums else sums[0]
    if parts in (Parts.ALL, Parts.ALL_AND_BIAS):
        bias_grad = parts is Parts.ALL_AND_BIAS
        work = chunk.work(q, k, kernel, bias_grad)
        saved = SavedRows(grad, q, lse, rows)
        gradients = RowGradients(work, saved, dq_before, bias_grad)
        dk, dv = gradients.of_chunk(k, v)
        dq = gradients.dq.to(q.dtype) if final else gradients.dq
        dbias = [chunk.own_columns(gradients.dbias)] if bias_grad else []
        return [dq, dk, dv, *dbias]
    if kernel is not StepKernel.TEMPLATE:
        kernel = StepKernel.MATH  # aten's kernels give all at once
    work, of_keys = chunk.work(q, k, kernel), parts is Parts.DKDV
    if work.templates is not None:
        return work.templates.gradients(
            of_keys, (grad, q, lse, rows), k, v, sums, final
        )
    saved = SavedRows(grad, q, lse, delta=rows)
    gradients = RowGradients(work, saved, dq_before)
    totals = list(gradients.of_chunk(k, v))
    if not of_keys:
        totals = [gradients.dq]
    elif sums:
        totals = list(map(torch.add, totals, sums))
    return [x.to(q.dtype) for x in totals] if final else totals


def _fake_gradients(arguments: Mapping[str, Any]) -> list[Tensor]:
    wanted, final = Parts(arguments["parts"]), arguments["final"]
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    if wanted is Parts.DKDV:
        return [fake_sum(k, final), fake_sum(v, final)]
    found = [fake_sum(q, final)]
    if wanted is not Parts.DQ:
        found += [fake_sum(k, False), fake_sum(v, False)]
    if wanted is Parts.ALL_AND_BIAS:
        told = StepArguments(*(arguments[name] for name in StepArguments._fields))
        found.append(told.read().fake_columns(q))
    return found


fake_by_name(attention_step_backward, _fake_gradients)
