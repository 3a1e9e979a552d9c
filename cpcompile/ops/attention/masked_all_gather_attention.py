"""cp::masked_all_gather_attention: gathered keys under a mask.

Keys are gathered as cp::all_gather_attention does it, see Note [Gathered keys in their
own order]; what no local row sees is not computed, see masked_steps.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpcompile.geometry.mask_blocks import Span, spans
from cpcompile.ops.attention.all_gather_attention import (
    Gathered,
    gather_keys,
    scatter_gradients,
)
from cpcompile.ops.attention.masked_contract import (
    check_masks,
    fake_masked_backward,
    fake_masked_forward,
    mask_layout,
    register_masked_autograd,
)
from cpcompile.ops.steps.masked_steps import MaskedGradients, MaskedRows, MaskOperands
from cpcompile.ops.steps.online_softmax import RunningAttention


@torch.library.custom_op("cp::masked_all_gather_attention", mutates_args=())
def masked_all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    limits: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_len: int,
    kv_len: int,
    scale: float,
    group: str,
    layout: str = "contiguous",
    known: str = "",
) -> tuple[Tensor, Tensor]:
    """Attention under a mask over a sequence sharded on `group`, on gathered keys.

    Arguments, results and errors are those of cp::masked_ring_attention.
    """
    masks = MaskOperands(bias, limits, q_ids, k_ids, known)
    name, lengths = "cp::masked_all_gather_attention", (q_len, kv_len)
    own, rows = _prepared(name, (q, k, v), masks, lengths, scale, group, layout)
    running = RunningAttention(q, v.shape[-1])
    rows.forward(running, *gather_keys(k, v, own), 0)
    return running.result(True)


@torch.library.custom_op("cp::masked_all_gather_attention_backward", mutates_args=())
def masked_all_gather_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    limits: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_len: int,
    kv_len: int,
    scale: float,
    group: str,
    layout: str = "contiguous",
    known: str = "",
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv, dbias), see cp::masked_ring_attention_backward."""
    masks = MaskOperands(bias, limits, q_ids, k_ids, known)
    name, lengths = "cp::masked_all_gather_attention_backward", (q_len, kv_len)
    own, rows = _prepared(
        name, (q, k, v), masks, lengths, scale, group, layout, bias_grad
    )
    found = MaskedGradients(rows, grad, q, out, lse, bias_grad)
    sums = found.of_source(*gather_keys(k, v, own), 0)
    dk, dv = scatter_gradients(sums, k, v, own)
    return found.result(dk, dv)


def _prepared(
    name: str,
    operands: tuple[Tensor, Tensor, Tensor],
    masks: MaskOperands,
    lengths: tuple[int, int],
    scale: float,
    group: str,
    layout: str,
    bias_grad: bool = False,
) -> tuple[Gathered, MaskedRows]:
    """How keys are gathered, and what this rank computes on all of them."""
    q, _, v = operands
    order = mask_layout(name, layout, lengths, masks.bias)
    # As for causal attention: keys in the order of the sequence.
    own = Gathered.of(name, operands, lengths, True, group, layout)
    check_masks(name, q, masks, lengths)
    rows = [spans(order, own.queries, each) for each in range(own.queries.ranks)]
    keys = [(Span(0, 0, lengths[1]),) if lengths[1] else ()]
    return own, MaskedRows.of(
        q, v, masks, lengths, rows, keys, own.rank, scale, bias_grad
    )


masked_all_gather_attention.register_fake(fake_masked_forward)
masked_all_gather_attention_backward.register_fake(fake_masked_backward)
register_masked_autograd(
    masked_all_gather_attention, masked_all_gather_attention_backward
)
