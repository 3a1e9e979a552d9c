"""A DTensor's local part, differentiable where shards are uneven too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(x: DTensor) -> Tensor:
    """x.to_local() for Shard and Replicate, with the true strides in the backward.

    to_local works out the gradient's global strides from its local ones, which is
    wrong where shards are uneven.
    """
    return _LocalPart.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = x.device_mesh, x.placements, x.shape
        local = x._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> DTensor:
        (grad,) = grads
        return DTensor.from_local(
            grad.contiguous(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=contiguous_strides(ctx.shape),
        )


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])
