"""What the operators under a mask share: checks, fake results, autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.ops.steps.masked_steps import MaskOperands, new_bias_gradient
from cpcompile.ops.steps.math_attention import accumulation_dtype
from cpcompile.plans import Layout

LAYOUTS = (Layout.CONTIGUOUS, Layout.ZIGZAG)


def check_masks(
    name: str, q: Tensor, masks: MaskOperands, lengths: tuple[int, int]
) -> None:
    """Raise ValueError unless these are masks of q [B, H, local queries, D]."""
    (B, H, R, _), (q_len, kv_len) = q.shape, lengths
    bias, limits, q_ids, k_ids, _ = masks
    mistakes = []
    shape: tuple[int, ...]
    for what, x, shape in (
        ("limits", limits, (B, q_len, 2)),
        ("q_ids", q_ids, (B, q_len)),
        ("k_ids", k_ids, (B, kv_len)),
    ):
        if x is not None and (x.is_floating_point() or x.dtype == torch.bool):
            mistakes.append(f"{what} {x.dtype}, needed integers")
        if x is not None and x.shape not in (shape, (1, *shape[1:])):
            mistakes.append(f"{what} {tuple(x.shape)}, needed {shape}, or 1 for {B}")
    if (q_ids is None) != (k_ids is None):
        mistakes.append("only one of q_ids and k_ids, needed both or none")
    if bias is not None:
        if bias.dtype != torch.bool and not bias.is_floating_point():
            mistakes.append(f"bias {bias.dtype}, needed bool or floating point")
        sizes = bias.ndim == 4 and bias.shape[0] in (1, B) and bias.shape[1] in (1, H)
        if not sizes or bias.shape[2:] != (R, kv_len):
            shape = tuple(bias.shape)
            mistakes.append(f"bias {shape}, needed {(B, H, R, kv_len)}, or 1 for B, H")
    if mistakes:
        raise ValueError(
            f"{name}: of {q_len} queries, {R} of them local, and {kv_len} keys got "
            f"{'; '.join(mistakes)}. Pass integers of the whole sequences, and of the "
            "bias the rows of the local queries"
        )


def mask_layout(
    name: str, layout: str, lengths: tuple[int, int], bias: Tensor | None
) -> Layout:
    """The layout of that name; raises ValueError where the mask does not allow it."""
    if layout not in (names := [each.value for each in LAYOUTS]):
        raise ValueError(f"{name}: got layout={layout!r}; needed one of {names}")
    if layout != Layout.CONTIGUOUS.value and lengths[0] != lengths[1]:
        raise ValueError(
            f"{name}: got {lengths[0]} queries and {lengths[1]} keys in the {layout} "
            "layout; needed as many keys as queries, or layout='contiguous'"
        )
    if layout != Layout.CONTIGUOUS.value and bias is not None:
        raise ValueError(
            f"{name}: got a bias {tuple(bias.shape)} in the {layout} layout; needed a "
            "mask of limits and ids alone, or layout='contiguous'"
        )
    return Layout(layout)


def fake_masked_forward(
    q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Shapes of (out, lse)."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


def fake_masked_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of (dq, dk, dv, dbias)."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, new_bias_gradient(q, bias, wants_bias_gradient(rest))


def wants_bias_gradient(arguments: Sequence[object]) -> bool:
    """Whether `bias_grad`, the only bool, is set; arguments may lack defaults."""
    return any(x for x in arguments if isinstance(x, bool))


def register_masked_autograd(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Make `backward` the gradient of `forward`; lse itself has no gradient."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, *masks = inputs[:7]
        ctx.rest = inputs[7:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, *masks)

    def gradients(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Any, ...]:
        wanted = ctx.needs_input_grad[3]
        saved, rest = ctx.saved_tensors, ctx.rest
        *grads, dbias = backward(grad, *saved, *rest, bias_grad=wanted)
        unused = [None] * (3 + len(rest))  # limits, ids, and what is no tensor
        return (*grads, dbias if wanted else None, *unused)

    torch.library.register_autograd(
        forward._opoverload, gradients, setup_context=setup_context
    )
