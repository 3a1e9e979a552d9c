"""Local parts of DTensors, differentiable where shards are uneven too, and no views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_part(
    x: DTensor, grad_placements: Sequence[Placement] | None = None
) -> Tensor:
    """Do x.to_local() for Shard and Replicate, with the true strides in the backward.

    to_local works out the gradient's global strides from its local ones, which is
    wrong where shards are uneven. grad_placements: of the gradient, if not those of x.
    """
    wanted = x.placements if grad_placements is None else tuple(grad_placements)
    return _LocalPart.apply(x, wanted)  # type: ignore[no-any-return, no-untyped-call]


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, placements: tuple[Placement, ...]) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape = x.device_mesh, placements, x.shape
        local = x._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[DTensor, None]:
        (grad,) = grads
        gradient = dtensor_of(grad.contiguous(), ctx.mesh, ctx.placements, ctx.shape)
        return gradient, None


def dtensor_of(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
) -> DTensor:
    """Make a DTensor of local parts that may be uneven; contiguous without strides."""
    size = torch.Size(shape)
    stride = contiguous_strides(size) if strides is None else tuple(strides)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=size, stride=stride
    )


def no_view(x: Tensor) -> Tensor:
    """Return x, no view in the eyes of autograd, so that it can be written to.

    FSDP2's hooks on results of a block, too, are lost if a view of them is written to.
    A lazy conjugate or negative is computed: the new tensor would not have that mark.
    """
    return _NoView.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _NoView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.resolve_conj().resolve_neg()
        return x.new_empty(0).set_(x)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def owned(results: Sequence[Any], args: Sequence[Any]) -> Iterator[Any]:
    """Yield results of a program that users may write to, as to those of the model.

    Where tokens are gathered the program returns a view of what a collective made,
    which autograd lets nobody write to. A result that alone has its memory need not be
    a view.
    """
    memory = Counter(map(_memory, (*results, *args)))
    for x in results:
        made_inside = (
            isinstance(x, Tensor)
            and x.grad_fn is not None
            and x._base is not None
            and x._base.grad_fn is None
        )
        yield no_view(x) if made_inside and memory[_memory(x)] == 1 else x


def _memory(x: Any) -> int | None:
    local = x._local_tensor if isinstance(x, DTensor) else x
    return local.untyped_storage()._cdata if isinstance(local, Tensor) else None


def contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])
