"""What every cp:: attention operator shares: checks, fake results, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from cpcompile.layout import Chunks, Runs
from cpcompile.ops.math_attention import accumulation_dtype


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
    elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
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


def fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_len: int,
    kv_len: int,
    is_causal: bool,
    scale: float,
    group: str,
    *runs: int | None,
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
    *runs: int | None,
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
