"""Convert between tensors that every rank holds in full and their parts in a layout.

    plain or replicated, in natural order -> this rank's tokens of it, a DTensor
    sharded in a layout -> gathered, in natural order

All are differentiable. Tokens are sent only where a sharded tensor is gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.geometry.layout import TokenLayout
from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.torch_patches.missing_gradients import on_mesh


def place_tokens(
    x: DTensor, placements: tuple[Placement, ...], axis: int, tokens: TokenLayout
) -> DTensor:
    """Shard a tensor, which is Replicate on a mesh axis, on that axis in a layout.

    placements: the placements of the result; on `axis` a Shard or a _StridedShard,
    which says where the tokens are.
    """
    replicated = list(placements)
    replicated[axis] = Replicate()
    whole = x.redistribute(placements=replicated)
    return _Placed.apply(whole, tuple(placements), axis, tokens)  # type: ignore[no-any-return, no-untyped-call]


def gather_tokens(x: DTensor, axis: int, tokens: TokenLayout) -> Tensor:
    """Gather a tensor that is sharded in a layout as a plain one, in natural order."""
    dim, outer = _token_dim(x.placements[axis])
    for other, placement in enumerate(x.placements):
        if other < axis and getattr(placement, "dim", None) == dim:
            outer *= x.device_mesh.size(other)
    return _Reordered.apply(x.full_tensor(), dim, outer, tokens, True)  # type: ignore[no-any-return, no-untyped-call]


def in_natural_order(x: Tensor, placement: Placement, tokens: TokenLayout) -> Tensor:
    """Reorder a plain tensor that was gathered as it lay, in a layout.

    placement: the one that it had on the axis of the tokens.
    """
    return _Reordered.apply(x, *_token_dim(placement), tokens, True)  # type: ignore[no-any-return, no-untyped-call]


def _token_dim(placement: Any) -> tuple[int, int]:
    return placement.dim, getattr(placement, "split_factor", 1)


def pick_tokens(x: Tensor, dim: int, outer: int, length: int, index: Tensor) -> Tensor:
    """Pick tokens of a plain tensor whose `dim` is [outer, length, inner], by index."""
    split = x.unflatten(dim, (outer, length, x.shape[dim] // (outer * length)))
    picked: Tensor = split.index_select(dim + 1, index)
    return torch.flatten(picked, dim, dim + 2)


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: DTensor,
        placements: tuple[Placement, ...],
        axis: int,
        tokens: TokenLayout,
    ) -> DTensor:
        mesh: DeviceMesh = x.device_mesh
        ctx.mesh, ctx.placements = mesh, placements
        ctx.axis, ctx.tokens = axis, tokens
        ctx.whole = x.placements
        dim, outer = _token_dim(placements[axis])
        index = tokens.positions(mesh.get_local_rank(axis), x.device)
        picked = pick_tokens(x.to_local(), dim, outer, tokens.length, index)
        return dtensor_of(picked, mesh, placements, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad = on_mesh(grads[0], ctx.mesh)
        dim, outer = _token_dim(ctx.placements[ctx.axis])
        # Gathered as it lies, in the order of the ranks.
        permuted = grad.redistribute(placements=ctx.whole)
        index = ctx.tokens.inverse(grad.device)
        local = pick_tokens(permuted.to_local(), dim, outer, ctx.tokens.length, index)
        result = dtensor_of(local, grad.device_mesh, ctx.whole, grad.shape)
        return result, None, None, None


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
