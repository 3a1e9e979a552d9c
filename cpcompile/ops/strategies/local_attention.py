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
from cpcompile.ops.step.masked_gradients import MaskedGradients
from cpcompile.ops.step.masked_steps import (
    MaskedRows,
    TokenSpans,
    summarize_mask,
)
from cpcompile.ops.step.online_softmax import RunningAttention
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
    rows = _rows("cp::local_attention", q, k, v, inputs)
    running = RunningAttention(q, v.shape[-1])
    rows.forward(running, k, v, 0)
    return with_sinks(*running.result(True), inputs.sinks, rows.mask.highest)


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
    rows = _rows(name, q, k, v, inputs, bias_grad)
    grad, out = with_column(grad, out, grad_lse)
    found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
    dk, dv = found.of_source(k, v, 0)
    return found.result(dk.to(k.dtype), dv.to(v.dtype))


def _rows(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    inputs: AttentionInputs,
    bias_grad: bool = False,
) -> MaskedRows:
    check_layout(name, inputs.spec.layout)
    lengths = q.shape[2], k.shape[2]
    queries, keys = (Runs.contiguous(length, 1) for length in lengths)
    check_operands(name, q, k, v, queries, keys, 0)
    check_inputs(name, q, inputs, lengths)
    places = TokenSpans(
        rows=(spans(Layout.CONTIGUOUS, queries, 0),),
        keys=(spans(Layout.CONTIGUOUS, keys, 0),),
        rank=0,
        lengths=lengths,
    )
    seen = summarize_mask(q, v, inputs, places, bias_grad)
    return MaskedRows.of(q, v, inputs, places, seen, bias_grad)


register(local_attention, local_attention_backward)
