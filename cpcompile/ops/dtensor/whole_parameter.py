"""A parameter that is sharded over ranks, gathered where a module reads it.

Modules of `cp.shard_parameters` read their parameters through `whole_parameter`. In
eager mode that is all. Dynamo puts the call into its graph as it is, where backend "cp"
makes the local parts inputs of the program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from cpcompile.ops.dtensor.local_part import local_part

DType = torch.dtype | None


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]  # torch leaves it so
def whole_parameter(
    x: DTensor, param_dtype: DType, reduce_dtype: DType, reshard_after_forward: bool
) -> Tensor:
    """Return all of a parameter, as a plain tensor.

    The gradient of x is the mean over the ranks of their gradients of the result.

    Args:
        x: on a 1-D mesh.
        param_dtype: dtype of the result, and of what is sent for it; None is that of x.
        reduce_dtype: dtype in which gradients are added up; None is that of x.
        reshard_after_forward: gather again in the backward, instead of keeping the
            result for it. Only a compiled program can.
    """
    layout = (x.placements, x.shape, tuple(x.stride()))
    return gathered(local_part(x), x.device_mesh, *layout, param_dtype, reduce_dtype)


def gathered(
    x: Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    param_dtype: DType,
    reduce_dtype: DType,
) -> Tensor:
    """Gather a sharded parameter from its local part, as whole_parameter does."""
    return _Whole.apply(  # type: ignore[no-any-return, no-untyped-call]
        x, mesh, placements, torch.Size(shape), stride, param_dtype, reduce_dtype
    )


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        shape: torch.Size,
        stride: tuple[int, ...],
        param_dtype: DType,
        reduce_dtype: DType,
    ) -> Tensor:
        ctx.mesh, ctx.placements, ctx.dtype = mesh, placements, local.dtype
        ctx.reduce_dtype = reduce_dtype or local.dtype
        local = local.detach()
        if param_dtype is not None:
            local = local.to(param_dtype)
        part = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )
        whole = part.redistribute(placements=[Replicate()]).to_local()
        return whole.view_as(whole)  # of one rank it is the parameter

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        summand = DTensor.from_local(
            grad.to(ctx.reduce_dtype), ctx.mesh, [Partial()], run_check=False
        )
        local = summand.redistribute(placements=ctx.placements).to_local()
        mean = (local / ctx.mesh.size()).to(ctx.dtype)
        return mean, None, None, None, None, None, None
