"""Let a redistribution pass on that a value has no gradient.

Where a backward returns None for an operand, autograd hands the redistribution that
made the operand a plain tensor of zeros, and its backward fails: it expects a DTensor
("'FunctionalTensor' object has no attribute '_local_tensor'"). `DTensor.from_local` and
`to_local` ask for None instead (torch 2.13 to 2.15).
"""

from __future__ import annotations

import functools
from typing import Any

# Private, seen in torch 2.13 to 2.15.
from torch.distributed.tensor._redistribute import Redistribute


@functools.cache
def install() -> None:
    """Have the backward of every redistribution accept None."""
    forward, backward = Redistribute.forward, Redistribute.backward

    @functools.wraps(forward)
    def forward_with_none(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.cp_operands = len(args)
        return forward(ctx, *args)

    @functools.wraps(backward)
    def backward_with_none(ctx: Any, grad_output: Any) -> Any:
        if grad_output is None:
            return (None,) * ctx.cp_operands
        return backward(ctx, grad_output)

    Redistribute.forward = staticmethod(forward_with_none)  # type: ignore[assignment, method-assign]
    Redistribute.backward = staticmethod(backward_with_none)  # type: ignore[method-assign]
