"""Gather tokens that lie in a layout, in natural order, and pick tokens by index."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import TokenLayout


def gather_tokens(x: DTensor, axis: int, tokens: TokenLayout) -> Tensor:
    """Gather a tensor that is sharded in a layout as a plain one, in natural order."""
    own: Any = x.placements[axis]
    dim, outer = own.dim, getattr(own, "split_factor", 1)
    for other, placement in enumerate(x.placements):
        if other < axis and getattr(placement, "dim", None) == dim:
            outer *= x.device_mesh.size(other)
    return _Reordered.apply(x.full_tensor(), dim, outer, tokens, True)  # type: ignore[no-any-return, no-untyped-call]


def pick_tokens(x: Tensor, dim: int, outer: int, length: int, index: Tensor) -> Tensor:
    """Pick tokens of a plain tensor whose `dim` is [outer, length, inner], by index."""
    split = x.unflatten(dim, (outer, length, x.shape[dim] // (outer * length)))
    picked: Tensor = split.index_select(dim + 1, index)
    return torch.flatten(picked, dim, dim + 2)


class _Reordered(torch.autograd.Function):
    """A reordering of tokens from the order of the ranks to natural order, or back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, outer: int, tokens: TokenLayout, natural: bool
    ) -> Tensor:
        ctx.rest = dim, outer, tokens, not natural
        index = (tokens.inverse if natural else tokens.permutation)(x.device)
        return pick_tokens(x, dim, outer, tokens.length, index)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (grad,) = grads
        gradient = _Reordered.apply(grad, *ctx.rest)  # type: ignore[no-untyped-call]
        return gradient, None, None, None, None
