"""cp::local_attention: whole sequences under a mask, on one rank.

It is what cp::ulysses_attention runs on its heads; it communicates with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.block_attention import with_column
from cpcompile.ops.step.kernel_choice import kernel_of_masked
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.row_gradients import RowGradients, SavedRows
from cpcompile.ops.step.row_work import RowWork
from cpcompile.ops.step.rows_under_mask import MaskedRows, TokenSpans
from cpcompile.ops.strategies.contract import (
    check_inputs,
    check_layout,
    check_operands,
    register,
)
from cpcompile.ops.strategies.sinks import with_sinks


@torch.library.custom_op("cp::local_attention", mutates_args=())
def local_attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str
) -> tuple[Tensor, Tensor]:
    """Attend over whole sequences under a mask, on one rank.

    Arguments, results and errors are those of cp::ring_attention on one rank.
    """
    inputs = AttentionInputs.of(spec, extras)
    work = _work("cp::local_attention", (q, k, v), inputs)
    running = RunningAttention(q, v.shape[-1])
    work.forward(running, k, v, final=True)
    row_shift = None if work.mask is None else work.mask.row_shift
    return with_sinks(*running.result(True), inputs.sinks, row_shift)


@torch.library.custom_op("cp::local_attention_backward", mutates_args=())
def local_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Sequence[Tensor],
    spec: str,
    bias_grad: bool,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv, dbias), see cp::ring_attention_backward."""
    inputs, name = AttentionInputs.of(spec, extras), "cp::local_attention_backward"
    work = _work(name, (q, k, v), inputs, bias_grad)
    grad, out = with_column(grad, out, grad_lse)
    saved = SavedRows(grad, q, lse, out)
    gradients = RowGradients(work, saved, bias_grad=bias_grad)
    dk, dv = gradients.of_chunk(k, v)
    dq = gradients.dq.to(q.dtype)
    return dq, dk.to(k.dtype), dv.to(v.dtype), gradients.whole_dbias


def _work(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    inputs: AttentionInputs,
    bias_grad: bool = False,
) -> RowWork:
    """Check the operands, and set up the work on all keys."""
    check_layout(name, inputs.spec.layout)
    q, k, v = operands
    lengths = q.shape[2], k.shape[2]
    queries, keys = (Runs.contiguous(length, 1) for length in lengths)
    check_operands(name, q, k, v, queries, keys, 0)
    check_inputs(name, q, inputs, lengths)
    token_spans = TokenSpans(
        rows=(spans(Layout.CONTIGUOUS, queries, 0),),
        keys=(spans(Layout.CONTIGUOUS, keys, 0),),
        rank=0,
        lengths=lengths,
    )
    kernel = kernel_of_masked(q, v, inputs, bias_grad)
    rows = MaskedRows(q, inputs, token_spans, kernel, bias_grad)
    return rows.work(rows.summarize(), 0, k.shape[2])


register(local_attention, local_attention_backward)
