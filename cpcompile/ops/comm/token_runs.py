"""Concatenations as one call of a graph: cp::move_runs and cp::gradient_bucket.

cp::move_runs puts runs of tokens in another order.

    x            [B, heads, tokens, dim], tokens cut into runs a b c
    order 2 0 1  c a b

One call of a graph, where a split and a concatenation are one call per run, and as many
in the gradient: a compiler handles each of them again in every layer, and makes kernels
of them that read and write no less, because the calls before and after exchange
messages or are attention. The gradient is the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.comm.communicating import goes_back_by


@torch.library.custom_op("cp::move_runs", mutates_args=())
def move_runs(x: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """Put the runs of x, of `counts` tokens on dim 2, in another order.

    Args:
        x: [B, heads, tokens, dim], of any dtype.
        counts: tokens of each run; together all of x.
        order: a permutation of the runs; the i-th of the result is run order[i].

    Returns: a new contiguous tensor of the shape of x.

    Raises: torch's error for counts that are not all tokens of x.
    """
    runs = x.split(list(counts), 2)
    result = x.new_empty(x.shape)
    return torch.cat([runs[i] for i in order], 2, out=result)


def _way_back(
    grad: Tensor, _: torch.Size, counts: Sequence[int], order: Sequence[int]
) -> Any:
    back = sorted(range(len(order)), key=order.__getitem__)
    return move_runs(grad, [counts[i] for i in order], back)


move_runs.register_fake(lambda x, *_: x.new_empty(x.shape))
goes_back_by(move_runs, _way_back)


@torch.library.custom_op("cp::gradient_bucket", mutates_args=())
def gradient_bucket(gradients: Sequence[Tensor]) -> Tensor:
    """Concatenate the elements of all gradients, one tensor after another.

    Inductor makes a kernel of a concatenation, with an operand and a loop for each
    tensor: at 48 layers g++ took half of its time for those. Where it can let each
    gradient be computed in its place in the vector, that saves the copies; a function
    of repeated blocks returns memory of its own, so that there is nothing to save.

    Args:
        gradients: one or more, of one dtype and device, any shapes.

    Returns: a new vector.

    Raises: torch's error for no gradients.
    """
    result = _empty_bucket(gradients)
    return torch.cat([x.reshape(-1) for x in gradients], out=result)


def _empty_bucket(gradients: Sequence[Tensor]) -> Tensor:
    return gradients[0].new_empty(sum(x.numel() for x in gradients))


gradient_bucket.register_fake(_empty_bucket)
