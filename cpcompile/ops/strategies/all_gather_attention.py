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
from cpcompile.geometry.mask_parts import TokenSpan
from cpcompile.kernels.choice import StepKernel, step_kernel
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.step.attention_step import attention_step
from cpcompile.ops.step.attention_step_backward import (
    attention_step_backward,
    attention_step_dkdv,
    attention_step_dq,
)
from cpcompile.ops.step.block_attention import (
    backward_kernel,
    row_dots,
    with_column,
)
from cpcompile.ops.step.masked_gradients import MaskedGradients
from cpcompile.ops.step.masked_steps import (
    MaskedRows,
    TokenSpans,
    summarize_mask,
)
from cpcompile.ops.step.online_softmax import RunningAttention
from cpcompile.ops.step.position_bias import new_bias_gradient
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
    if inputs.by_parts:
        own, rows = _under_mask(name, (q, k, v), inputs, sizes, group)
        running = RunningAttention(q, v.shape[-1])
        rows.forward(running, *gather_keys(k, v, own), 0)
        return with_sinks(*running.result(True), inputs.sinks, rows.mask.highest)
    own = Gathered.of(name, (q, k, v), inputs.spec, sizes, group)
    k_full, v_full = gather_keys(k, v, own)
    kernel = step_kernel(q.device.type, q.dtype, q.shape[-1], v.shape[-1]).value
    results = [
        attention_step(
            *(part, k_full, v_full, None, None, None, None, *limits),
            *(inputs.spec.scale, True, kernel),
        )
        for part, limits in zip(own.split(q), own.limits(), strict=True)
    ]
    outs, lses = zip(*results, strict=True)
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
    if inputs.by_parts:
        own, rows = _under_mask(name, (q, k, v), inputs, sizes, group, bias_grad)
        grad, out = with_column(grad, out, grad_lse)
        found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
        totals = found.of_source(*gather_keys(k, v, own), 0)
        return found.result(*scatter_gradients(totals, k, v, own))
    own = Gathered.of(name, (q, k, v), inputs.spec, sizes, group)
    k_full, v_full = gather_keys(k, v, own)
    kernel = backward_kernel(q, v, grad_lse)
    split = kernel is StepKernel.TEMPLATE
    if split:
        out = row_dots(grad, out, grad_lse)
    else:
        grad, out = with_column(grad, out, grad_lse)
    saved = (grad, q, out, lse)
    dqs: list[Tensor] = []
    sums: list[Tensor] = []
    parts = zip(*map(own.split, saved), own.limits(), strict=True)
    for grad_part, q_part, out_part, lse_part, limits in parts:
        if split:
            operands = (grad_part, q_part, k_full, v_full, lse_part, out_part)
            rest = (None, None, *limits, inputs.spec.scale)
            before = (*sums,) or (None, None)
            sums = list(
                attention_step_dkdv(*operands, *before, *rest, False, kernel.value)
            )
            dqs.append(attention_step_dq(*operands, None, *rest, True, kernel.value))
        else:
            dq, *new = attention_step_backward(
                *(grad_part, q_part, k_full, v_full, out_part, lse_part, None),
                *(*limits, inputs.spec.scale, True, kernel.value),
            )
            dqs.append(dq)
            sums = list(map(torch.add, sums, new)) if sums else new
    dk, dv = scatter_gradients(sums, k, v, own)
    return _joined(dqs), dk, dv, new_bias_gradient(q, None, False)


def _under_mask(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    inputs: AttentionInputs,
    sizes: Sequence[int],
    group: str,
    bias_grad: bool = False,
) -> tuple[Gathered, MaskedRows]:
    """Return how keys are gathered, and what this rank computes under the mask."""
    (q, _, v), (q_len, kv_len) = operands, sizes
    lengths = q_len, kv_len
    check_mask_layout(Strategy.ALL_GATHER, inputs, lengths)
    # As for causal attention: keys in the order of the sequence.
    ordered = replace(inputs.spec, is_causal=True)
    own = Gathered.of(name, operands, ordered, sizes, group)
    check_inputs(name, q, inputs, lengths)
    queries = Runs.contiguous(q_len, own.queries.ranks)
    layout = inputs.spec.layout
    places = TokenSpans(
        rows=tuple(spans(layout, queries, each) for each in range(queries.ranks)),
        keys=((TokenSpan(0, 0, kv_len),) if kv_len else (),),
        rank=own.rank,
        lengths=lengths,
    )
    seen = summarize_mask(q, v, inputs, places, bias_grad)
    return own, MaskedRows.of(q, v, inputs, places, seen, bias_grad)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Undo Gathered.split."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)


register(all_gather_attention, all_gather_attention_backward)
