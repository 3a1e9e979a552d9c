"""The gradient of an operator on a list of tensors, by a second operator.

    operator(tensors, text) -> results
    backward(gradients of results, tensors, graded, needed, text) -> gradients

`graded` and `needed` are the numbers of the results that have a gradient, and of the
tensors that need one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.library import CustomOpDef


def differentiate(operator: CustomOpDef, backward: Callable[..., list[Tensor]]) -> None:
    """Register `backward` as the gradient of `operator`."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors, ctx.text = inputs
        ctx.save_for_backward(*tensors)
        ctx.needed = [i for i, x in enumerate(tensors) if x.requires_grad]

    def gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, None]:
        tensors = list(ctx.saved_tensors)
        found: list[Tensor | None] = [None] * len(tensors)
        graded = [i for i, g in enumerate(grads) if g is not None]
        given = [g for g in grads if g is not None]
        if given and ctx.needed:
            args = given, tensors, graded, ctx.needed, ctx.text
            for i, grad in zip(ctx.needed, backward(*args), strict=True):
                found[i] = grad
        return found, None

    operator.register_autograd(gradients, setup_context=remember)
