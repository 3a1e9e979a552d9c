"""What every cp:: attention operator shares: checks, fake results, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.geometry.layout import Arrangement, Chunks, Runs
from cpcompile.ops.steps.math_attention import accumulation_dtype
from cpcompile.plans import Layout


def check_operands(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Chunks | Runs,
    keys: Chunks | Runs,
    rank: int,
) -> None:
    """Raise ValueError unless q, k, v are this rank's chunks of the sequences."""
    mistakes = []
    if not (q.ndim == k.ndim == v.ndim == 4):
        mistakes.append("q, k and v need four dimensions [batch, heads, tokens, dim]")
    elif q.shape[0] != k.shape[0]:
        mistakes.append("q and k need the same batch")
    elif q.shape[1] != k.shape[1] and (k.shape[1] == 0 or q.shape[1] % k.shape[1]):
        mistakes.append("the query heads need to be a multiple of the key heads")
    elif q.shape[2] != queries.count(rank):
        mistakes.append(f"rank {rank} needs {queries.count(rank)} queries")
    elif k.shape[2] != keys.count(rank):
        mistakes.append(f"rank {rank} needs {keys.count(rank)} keys")
    if q.shape[-1] != k.shape[-1] or k.shape[:-1] != v.shape[:-1]:
        mistakes.append("k needs the head dim of q, and v the other dims of k")
    if not (q.dtype == k.dtype == v.dtype):
        mistakes.append(f"one dtype is needed, got {q.dtype}, {k.dtype}, {v.dtype}")
    if mistakes:
        raise ValueError(
            f"{name}: got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} "
            f"of sequences of {queries.length} queries and {keys.length} keys on "
            f"{queries.ranks} ranks: {'; '.join(mistakes)}. Pass contiguous chunks as "
            "torch.chunk makes them, or DTensors sharded on the sequence."
        )


def dealt_tokens(
    name: str,
    layout: str,
    supported: tuple[Layout, ...],
    queries: Chunks | Runs,
    keys: Chunks | Runs,
    is_causal: bool,
) -> Arrangement | None:
    """Which tokens the ranks hold, of queries and of keys alike.

    None where `queries` and `keys` say it: in the contiguous layout, and without a
    mask, since the order of the keys makes no difference then.

    Raises: ValueError for a layout that is not supported, and for causal attention in
    a layout that deals the keys out otherwise than the queries.
    """
    if layout not in (names := [each.value for each in supported]):
        raise ValueError(f"{name}: got layout={layout!r}; needed one of {names}")
    if layout == Layout.CONTIGUOUS.value or not is_causal:
        return None
    if queries != keys:
        raise ValueError(
            f"{name}: got {queries.length} queries and {keys.length} keys, at most "
            f"{queries.size} and {keys.size} on a rank, in the {layout} layout; causal "
            "attention needs as many keys as queries, or layout='contiguous'"
        )
    return Arrangement(Layout(layout), keys.length, keys.ranks, keys.size)


def fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    *rest: int | str | None,
) -> tuple[Tensor, Tensor]:
    """Shapes of (out, lse)."""
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))


def fake_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    *rest: int | str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of (dq, dk, dv)."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def register_autograd(forward: CustomOpDef, backward: CustomOpDef) -> None:
    """Make `backward` the gradient of `forward`; lse itself has no gradient."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, *ctx.rest = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    def gradients(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Any, ...]:
        grads = backward(grad, *ctx.saved_tensors, *ctx.rest)
        return (*grads, *[None] * len(ctx.rest))

    torch.library.register_autograd(
        forward._opoverload, gradients, setup_context=setup_context
    )
