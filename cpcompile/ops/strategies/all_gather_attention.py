"""cp::all_gather_attention: keys and values are gathered once, queries stay.

One collective instead of N - 1 hops and one or two kernel calls instead of N, for the
memory of the whole keys and values. Method: the context parallelism of Llama 3 (arXiv
2407.21783, section 3.3.2). The backward gathers again and reduce-scatters dK and dV.
The keys are gathered by gathered_keys.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Runs
from cpcompile.geometry.mask_blocks import spans
from cpcompile.geometry.mask_tiles import TokenSpan
from cpcompile.kernels.choice import StepKernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.step.block_attention import row_dots, with_column
from cpcompile.ops.step.kernel_choice import call_kernel, kernel_of_masked
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import new_bias_gradient
from cpcompile.ops.step.row_gradients import RowGradients, SavedRows
from cpcompile.ops.step.rows_under_mask import MaskedRows, TokenSpans
from cpcompile.ops.strategies.contract import (
    check_inputs,
    check_mask_layout,
    register,
)
from cpcompile.ops.strategies.gathered_keys import (
    Gathered,
    gather_keys,
    scatter_gradients,
)
from cpcompile.ops.strategies.sinks import with_sinks


@torch.library.custom_op("cp::all_gather_attention", mutates_args=())
def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Attend over a sequence sharded on `group`, on gathered keys and values.

    Arguments, results and errors are those of cp::ring_attention; the layout is
    contiguous or zigzag, and there is one run.
    """
    name, inputs = "cp::all_gather_attention", AttentionInputs.of(spec, extras)
    if inputs.has_modifiers:
        own, rows = _masked_rows(name, (q, k, v), inputs, sizes, group)
        summary, running = rows.summarize(), RunningAttention(q, v.shape[-1])
        k_full, v_full = gather_keys(k, v, own)
        work = rows.work(summary, 0, k_full.shape[2])
        work.forward(running, k_full, v_full, final=True)
        return with_sinks(*running.result(True), inputs.sinks, summary.row_shift)
    own = Gathered.of(name, (q, k, v), inputs.spec, sizes, group)
    k_full, v_full = gather_keys(k, v, own)
    kernel = call_kernel(q, v, inputs)
    outs, lses = [], []
    for part, limits in zip(own.split(q), own.limits(inputs.spec.scale), strict=True):
        operands, how = (part, k_full, v_full, None, None), (True, kernel.value)
        out, lse = attention_step(*operands, *limits.arguments(), *how)
        outs.append(out)
        lses.append(lse)
    return with_sinks(_joined(outs), _joined(lses), inputs.sinks)


@torch.library.custom_op("cp::all_gather_attention_backward", mutates_args=())
def all_gather_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    group: str,
    bias_grad: bool,
    grad_lse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dq, dk, dv, dbias), see cp::ring_attention_backward.

    Sums over blocks and over ranks are in the accumulation dtype.
    """
    name = "cp::all_gather_attention_backward"
    inputs = AttentionInputs.of(spec, extras)
    if inputs.has_modifiers:
        own, rows = _masked_rows(name, (q, k, v), inputs, sizes, group, bias_grad)
        summary = rows.summarize()
        grad, out = with_column(grad, out, grad_lse)
        k_full, v_full = gather_keys(k, v, own)
        work = rows.work(summary, 0, k_full.shape[2])
        saved = SavedRows(grad, q, lse, out)
        gradients = RowGradients(work, saved, bias_grad=bias_grad)
        totals = gradients.of_chunk(k_full, v_full)
        dk, dv = scatter_gradients(totals, k, v, own)
        return gradients.dq.to(q.dtype), dk, dv, gradients.whole_dbias
    own = Gathered.of(name, (q, k, v), inputs.spec, sizes, group)
    k_full, v_full = gather_keys(k, v, own)
    kernel = call_kernel(q, v, inputs, bias_grad, grad_lse)
    split = kernel is StepKernel.TEMPLATE
    if split:
        out = row_dots(grad, out, grad_lse)
    else:
        grad, out = with_column(grad, out, grad_lse)
    dqs: list[Tensor] = []
    sums: list[Tensor] = []
    saved_parts = zip(*map(own.split, (grad, q, out, lse)), strict=True)
    every_limits = own.limits(inputs.spec.scale)
    for parts, limits in zip(saved_parts, every_limits, strict=True):
        grad_part, q_part, out_part, lse_part = parts
        operands, arguments = (grad_part, q_part, k_full, v_full), limits.arguments()
        if split:
            rows_saved = (*operands, lse_part, out_part)
            before = (*sums,) or (None, None)
            sums = list(
                attention_step_dkdv(
                    *rows_saved, *before, *arguments, False, kernel.value
                )
            )
            how = (True, kernel.value)
            dqs.append(attention_step_dq(*rows_saved, None, *arguments, *how))
        else:
            rows_saved = (*operands, out_part, lse_part)
            dq, dk_part, dv_part, _ = attention_step_backward(
                *rows_saved, None, *arguments, False, True, kernel.value
            )
            dqs.append(dq)
            new = [dk_part, dv_part]
            sums = list(map(torch.add, sums, new)) if sums else new
    dk, dv = scatter_gradients(sums, k, v, own)
    return _joined(dqs), dk, dv, new_bias_gradient(q, None, False)


def _masked_rows(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    inputs: AttentionInputs,
    sizes: Sequence[int],
    group: str,
    bias_grad: bool = False,
) -> tuple[Gathered, MaskedRows]:
    """Return how keys are gathered, and the rows of this rank under the mask."""
    (q, _, v), (q_len, kv_len) = operands, sizes
    lengths = q_len, kv_len
    check_mask_layout(Strategy.ALL_GATHER, inputs, lengths)
    # As for causal attention: keys in the order of the sequence.
    ordered = replace(inputs.spec, is_causal=True)
    own = Gathered.of(name, operands, ordered, sizes, group)
    check_inputs(name, q, inputs, lengths)
    queries = Runs.contiguous(q_len, own.queries.ranks)
    layout = inputs.spec.layout
    token_spans = TokenSpans(
        rows=tuple(spans(layout, queries, rank) for rank in range(queries.ranks)),
        keys=((TokenSpan(0, 0, kv_len),) if kv_len else (),),
        rank=own.rank,
        lengths=lengths,
    )
    kernel = kernel_of_masked(q, v, inputs, bias_grad)
    return own, MaskedRows(q, inputs, token_spans, kernel, bias_grad)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Undo Gathered.split."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


register(all_gather_attention, all_gather_attention_backward)
