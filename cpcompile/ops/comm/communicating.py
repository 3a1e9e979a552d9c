"""Operators whose gradient is a way back, and which of them send when they run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.torch_private.operators import OpOverload


@functools.cache
def communicates(target: Any) -> bool:
    """Tell whether `target` is an operator of ours that sends: it has a group argument.

    An operator that is made of others before it runs does not count.
    """
    if not isinstance(target, OpOverload) or target.namespace != "cp":
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    of_group = any(argument.name == "group" for argument in target._schema.arguments)
    return of_group and not target.has_kernel_for_dispatch_key(composite)


def goes_back_by(operator: CustomOpDef, way_back: Callable[..., Any]) -> None:
    """Make `way_back` the gradient of the first argument of `operator`.

    It is called with the gradients of the results, the shape of that argument (a list
    of shapes for a list of tensors), and the other arguments, which have no gradient.
    """

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first, *ctx.rest = inputs
        is_one = isinstance(first, Tensor)
        ctx.shapes = first.shape if is_one else [x.shape for x in first]

    def gradient(ctx: Any, grads: Any) -> tuple[Any, ...]:
        return way_back(grads, ctx.shapes, *ctx.rest), *[None] * len(ctx.rest)

    operator.register_autograd(gradient, setup_context=remember)
