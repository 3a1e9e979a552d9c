"""Gradients that are not those that autograd would give: summands, and of writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.torch_patches.missing_gradients import on_mesh


class UnreducedGradient(torch.autograd.Function):
    """A local tensor as a DTensor whose gradient stays a summand on some axes.

    placements: the placements of the DTensor, Replicate on `axes`.
    axes: the axes whose ranks get summands; on others the gradient is as the tensor is.
    layout: global shape and strides, or None where they follow from equal shards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        axes: tuple[int, ...],
        factor: int,
        layout: tuple[torch.Size, tuple[int, ...]] | None,
    ) -> DTensor:
        ctx.set_materialize_grads(False)  # zeros would be a plain tensor
        ctx.mesh, ctx.placements = mesh, placements
        ctx.axes, ctx.factor = axes, factor
        shape, stride = layout or (None, None)
        return DTensor.from_local(
            x, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(
        ctx: Any, *grads: Any
    ) -> tuple[Tensor | None, None, None, None, None, None]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None, None
        grad = on_mesh(grad, ctx.mesh)
        factor, placements = ctx.factor, list(grad.placements)
        for axis, wanted in enumerate(ctx.placements):
            if axis not in ctx.axes:
                placements[axis] = Replicate() if wanted.is_partial() else wanted
            elif not placements[axis].is_partial():
                placements[axis] = Replicate()
                # Complete on every rank, it is counted once after the sum.
                factor /= grad.device_mesh.size(axis)
        share = grad.redistribute(placements=placements).to_local()
        share = share if factor == 1 else share * factor
        return share, None, None, None, None, None


def as_if_written(x: Tensor, new: Tensor) -> Tensor:
    """Return `new`, the value of x after a write in place, with the gradient of x then.

    A write under no_grad is not recorded: x keeps its history, and so its gradient,
    whatever its numbers are.
    """
    if torch.is_grad_enabled() or not x.requires_grad:
        return new
    with torch.enable_grad():
        return _Unrecorded.apply(x, new)  # type: ignore[no-any-return, no-untyped-call]


class _Unrecorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, new: Tensor) -> Tensor:
        return new.view_as(new)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None]:
        return grads[0], None
