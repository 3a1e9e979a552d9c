"""cp::local_attention: whole sequences under a mask, on one rank.

It is what cp::ulysses_attention runs on its heads; it communicates with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpcompile.geometry.layout import Runs
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.strategies.contract import (
    check_inputs,
    check_layout,
    check_operands,
    register,
)
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward


@torch.library.custom_op("cp::local_attention", mutates_args=())
def local_attention(
    q: Tensor, k: Tensor, v: Tensor, extras: Sequence[Tensor], spec: str
) -> tuple[Tensor, Tensor]:
    """Attend over whole sequences under a mask, on one rank.

    Arguments, results and errors are those of cp::ring_attention on one rank.
    """
    inputs = AttentionInputs.of(spec, extras)
    ring = _one_rank("cp::local_attention", (q, k, v), inputs)
    return ring_forward(q, k, v, ring)


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
    ring = _one_rank(name, (q, k, v), inputs)
    return ring_backward(grad, q, k, v, out, lse, ring, bias_grad, grad_lse)


def _one_rank(
    name: str, operands: tuple[Tensor, Tensor, Tensor], inputs: AttentionInputs
) -> Ring:
    """Check the operands, and return a ring that sends nothing."""
    check_layout(name, inputs.spec.layout)
    queries, keys = (Runs.contiguous(x.shape[2], 1) for x in operands[:2])
    check_operands(name, *operands, queries, keys, 0)
    check_inputs(name, operands[0], inputs, (queries.length, keys.length))
    return Ring(queries, keys, False, "", 0, name, inputs=inputs)


register(local_attention, local_attention_backward)
