"""Compositions as one call each, forward and backward, on the whole sequence.

    out, lse, saved = cp_whole.ulysses_attention(q, k, v, extras, ...)
    dq, dk, dv, more = cp_whole.ulysses_attention_backward(
        grad, grad_lse, saved, needed, q, k, v, extras, ...
    )

What a composition is made of takes the tensors of a rank. These calls take whole ones.
They have shapes and a gradient, and nothing runs them: what a rank does in their place
is in passes/whole/composition_rules.py. `saved` stands for all that it keeps for its
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.latent_steps import WHOLE
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.torch_private.operators import OpOverload


class Composition(NamedTuple):
    """A composition on the tensors of a rank, and its two calls on whole tensors."""

    call: OpOverload
    forward: OpOverload
    backward: OpOverload


def composition_of(name: str) -> Composition:
    """Define the two calls of the composition cp::`name`, which takes its arguments."""
    call = getattr(torch.ops.cp, name).default
    told = str(call._schema).partition("(")[2].partition(")")[0]
    spec = [x.name for x in call._schema.arguments].index("spec")

    def forward_of_whole(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        out, lse = q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(0)
        if AttentionSpec.of_text(rest[spec - 3]).wants_lse:
            lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
        return out, lse, q.new_empty(0)

    def backward_of_whole(
        grad: Tensor | None,
        grad_lse: Tensor | None,
        saved: Tensor,
        needed: Sequence[bool],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        extras: Sequence[Tensor],
        *_: Any,
    ) -> Any:
        learns = [x for x, need in zip(extras, needed, strict=True) if need]
        dq, dk, dv, *more = (x.new_empty(x.shape) for x in (q, k, v, *learns))
        return dq, dk, dv, more

    forward = torch.library.custom_op(
        f"{WHOLE}::{name}",
        _not_run,
        mutates_args=(),
        schema=f"({told}) -> (Tensor, Tensor, Tensor)",
    )
    backward = torch.library.custom_op(
        f"{WHOLE}::{name}_backward",
        _not_run,
        mutates_args=(),
        schema=f"(Tensor? grad, Tensor? grad_lse, Tensor saved, bool[] needed, {told})"
        " -> (Tensor, Tensor, Tensor, Tensor[])",
    )
    forward.register_fake(forward_of_whole)
    backward.register_fake(backward_of_whole)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, extras, *ctx.rest = inputs
        ctx.set_materialize_grads(False)  # mostly nothing reads the log-sum-exp
        ctx.saved = output[2]  # it is no tensor but a name, which has no detach
        ctx.save_for_backward(q, k, v, *extras)

    def gradients(ctx: Any, grad: Any, grad_lse: Any, _: Any) -> tuple[Any, ...]:
        q, k, v, *extras = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[3])
        given = (ctx.saved, needed, q, k, v, extras)
        dq, dk, dv, more = backward(grad, grad_lse, *given, *ctx.rest)
        found = iter(more)
        of_extras = [next(found) if need else None for need in needed]
        return dq, dk, dv, of_extras, *[None] * len(ctx.rest)

    forward.register_autograd(gradients, setup_context=setup_context)
    return Composition(call, forward._opoverload, backward._opoverload)


def _not_run(*_: Any) -> Any:
    raise NotImplementedError("a call on the whole sequence, which no rank runs")
