"""cp::local_attention: whole sequences under a mask, on one rank.

It is what cp::ulysses_attention runs on its heads; it communicates with nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.ops.step.block_attention import with_column
from cpcompile.ops.step.masked_gradients import MaskedGradients
from cpcompile.ops.step.masked_steps import (
    MaskedRows,
    TokenSpans,
    look_at,
)
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.row_mask import MaskOperands
from cpcompile.ops.strategies.contract import check_masks, check_operands, register
from cpcompile.ops.strategies.sinks import with_sinks


@torch.library.custom_op("cp::local_attention", mutates_args=())
def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over whole sequences under a mask, on one rank.

    Arguments, results and errors are those of cp::ring_attention on one rank.
    """
    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds)
    masks = MaskOperands.of(fields, known, *changes, score_mod=score_mod)
    rows = _rows("cp::local_attention", q, k, v, masks, scale)
    running = RunningAttention(q, v.shape[-1])
    rows.forward(running, k, v, 0)
    return with_sinks(*running.result(True), sinks, rows.mask.highest)


@torch.library.custom_op("cp::local_attention_backward", mutates_args=())
def local_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    q_segment_ids: Tensor | None = None,
    kv_segment_ids: Tensor | None = None,
    known: str = "",
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seeds: Tensor | None = None,
    score_mod: str = "",
    bias_grad: bool = False,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv, dbias), see cp::ring_attention_backward."""
    fields = (bias, key_ranges, q_segment_ids, kv_segment_ids)
    changes = (softcap, dropout_p, seeds)
    masks = MaskOperands.of(fields, known, *changes, score_mod=score_mod)
    name = "cp::local_attention_backward"
    rows = _rows(name, q, k, v, masks, scale, bias_grad)
    grad, out = with_column(grad, out, grad_lse)
    found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
    dk, dv = found.of_source(k, v, 0)
    return found.result(dk.to(k.dtype), dv.to(v.dtype))


def _rows(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: MaskOperands,
    scale: float,
    bias_grad: bool = False,
) -> MaskedRows:
    lengths = q.shape[2], k.shape[2]
    queries, keys = (Runs.contiguous(length, 1) for length in lengths)
    check_operands(name, q, k, v, queries, keys, 0)
    check_masks(name, q, masks, lengths)
    places = TokenSpans(
        rows=(spans(Layout.CONTIGUOUS, queries, 0),),
        keys=(spans(Layout.CONTIGUOUS, keys, 0),),
        rank=0,
        lengths=lengths,
    )
    seen = look_at(q, v, masks, places, bias_grad)
    return MaskedRows.of(q, v, masks, places, seen, scale, bias_grad)


register(local_attention, local_attention_backward)
