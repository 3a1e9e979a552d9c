"""cp::local_attention: whole sequences under a mask, on one rank.

It is what cp::ulysses_attention runs on its heads; it communicates with nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.layout import Runs
from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.strategies.contract import (
    Saved,
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


def _gradients(saved: Saved, inputs: AttentionInputs, *how: Any) -> tuple[Tensor, ...]:
    ring = _one_rank("cp::local_attention_backward", saved[1:4], inputs)
    return ring_backward(*saved, ring, *how)


def _one_rank(
    name: str, operands: tuple[Tensor, Tensor, Tensor], inputs: AttentionInputs
) -> Ring:
    """Check the operands, and return a ring that sends nothing."""
    check_layout(name, inputs.spec.layout)
    queries, keys = (Runs.contiguous(x.shape[2], 1) for x in operands[:2])
    check_operands(name, *operands, queries, keys, 0)
    check_inputs(name, operands[0], inputs, (queries.length, keys.length))
    return Ring(queries, keys, False, "", 0, name, inputs=inputs)


local_attention_backward = register(local_attention, _gradients)
