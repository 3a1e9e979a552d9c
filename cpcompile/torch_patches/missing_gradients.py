"""Let a redistribution pass on that a value has no gradient, or plain zeros.

Where a backward returns None for an operand, autograd hands the redistribution that
made the operand a plain tensor of zeros, and its backward fails: it expects a DTensor
("'FunctionalTensor' object has no attribute '_local_tensor'"). `DTensor.from_local` and
`to_local` ask for None instead (torch 2.13 to 2.15).

The backwards of sgn, copysign and nextafter make zeros themselves, from the size of an
operand, which is the whole one: a plain tensor that every rank has, and for which
`from_local` is not prepared either.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# Private, seen in torch 2.13 to 2.15.
from torch.distributed.tensor._api import _FromTorchTensor
from torch.distributed.tensor._redistribute import Redistribute


@functools.cache
def install() -> None:
    """Have these backwards accept None, and a plain tensor."""
    forward, backward = Redistribute.forward, Redistribute.backward
    of_local = _FromTorchTensor.backward

    @functools.wraps(forward)
    def forward_with_none(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cp_operands = len(args)
        return forward(ctx, *args)

    @functools.wraps(backward)
    def backward_with_none(ctx: Any, grad_output: Any) -> Any:
        if grad_output is None:
            return (None,) * ctx.cp_operands
        return backward(ctx, on_mesh(grad_output, ctx.current_spec.mesh))

    @functools.wraps(of_local)
    def of_local_with_plain(ctx: Any, grad_output: Any) -> Any:
        if grad_output is not None:
            grad_output = on_mesh(grad_output, ctx.forward_input_device_mesh)
        return of_local(ctx, grad_output)

    Redistribute.forward = staticmethod(forward_with_none)  # type: ignore[assignment, method-assign]
    Redistribute.backward = staticmethod(backward_with_none)  # type: ignore[method-assign]
    _FromTorchTensor.backward = staticmethod(of_local_with_plain)  # type: ignore[method-assign]


def on_mesh(grad: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a gradient as a DTensor; a plain one is the same on every rank."""
    if isinstance(grad, DTensor):
        return grad
    everywhere = (Replicate(),) * mesh.ndim
    return DTensor.from_local(grad, mesh, everywhere, run_check=False)
