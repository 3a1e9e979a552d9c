"""cp::move_runs: put runs of tokens in another order.

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


@move_runs.register_fake
def _(x: Tensor, counts: Sequence[int], order: Sequence[int]) -> Tensor:
    return x.new_empty(x.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.counts, ctx.order = inputs


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    moved = [ctx.counts[i] for i in ctx.order]
    back = [0] * len(moved)
    for place, run in enumerate(ctx.order):
        back[run] = place
    return move_runs(grad, moved, back), None, None


move_runs.register_autograd(_gradient, setup_context=_remember)
