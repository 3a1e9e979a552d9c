"""In a graph of the whole sequence: how ranks share what mixes tokens.

    y = cumsum(x, 1)     ->  x = cp_whole.split_along(x, 1, 2)    tokens -> heads
                             y = cp_whole.split_along(cumsum(x, 1), 2, 1)
    cp.mixer([q, k, v])  ->  cp_whole.mixer_in_parts([q, k, v])   ranks pass on states

The value of the first is x: ranks exchange parts of one dimension for parts of another,
and those of the gradient on the way back. The second is what cp::mixer is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.listed_gradients import differentiate
from cpcompile.ops.mixers.mixer_operator import mixer, mixer_backward

ALL, BEGUN = -1, -2
"""In place of a dimension: every rank has all of it, as may be where tokens begin."""


@torch.library.custom_op("cp_whole::split_along", mutates_args=())
def split_along(x: Tensor, source: int, target: int) -> Tensor:
    """Return x, split along dimension `target` where it was along `source`.

    Each is a dimension, ALL, or BEGUN: ranks take their tokens of all, for good.
    """
    return x.clone()


@split_along.register_fake
def _(x: Tensor, source: int, target: int) -> Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.source, ctx.target = inputs


def _way_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return split_along(grad, ctx.target, ctx.source), None, None


split_along.register_autograd(_way_back, setup_context=_remember)


@torch.library.custom_op("cp_whole::mixer_in_parts", mutates_args=())
def mixer_in_parts(tensors: list[Tensor], call: str) -> list[Tensor]:
    """Return what cp::mixer does, which ranks compute for their own tokens each."""
    results: list[Tensor] = mixer(tensors, call)
    return results


@torch.library.custom_op("cp_whole::mixer_in_parts_backward", mutates_args=())
def mixer_in_parts_backward(
    grads: list[Tensor],
    tensors: list[Tensor],
    graded: list[int],
    needed: list[int],
    call: str,
) -> list[Tensor]:
    """Return what cp::mixer_backward does."""
    args = (grads, tensors, graded, needed, call)
    results: list[Tensor] = mixer_backward(*args)
    return results


mixer_in_parts.register_fake(lambda tensors, call: mixer(tensors, call))
mixer_in_parts_backward.register_fake(lambda *args: mixer_backward(*args))


differentiate(mixer_in_parts, mixer_in_parts_backward)

SPLIT_ALONG = torch.ops.cp_whole.split_along.default
IN_PARTS = torch.ops.cp_whole.mixer_in_parts.default
IN_PARTS_BACKWARD = torch.ops.cp_whole.mixer_in_parts_backward.default
