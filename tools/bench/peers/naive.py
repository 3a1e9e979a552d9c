"""A ring of attention in plain PyTorch, as one writes it first.

Scores of a step are materialised in float32, and masked by positions; operands are
[B, H, tokens, D] in the contiguous layout.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class NaiveExchange:
    """One isend and one irecv per tensor to the next rank, no packing."""

    def __init__(self, *tensors: Tensor) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.sent = [x.contiguous() for x in tensors]
        self.received = [torch.empty_like(x) for x in self.sent]
        self.works = []
        for ours, theirs in zip(self.sent, self.received, strict=True):
            self.works.append(dist.isend(ours, (rank + 1) % ranks))
            self.works.append(dist.irecv(theirs, (rank - 1) % ranks))

    def wait(self) -> list[Tensor]:
        """Wait for what the previous rank sent, and return it."""
        for work in self.works:
            work.wait()
        return self.received


def naive_scores(q: Tensor, k: Tensor, source: int, starts: Tensor | None) -> Tensor:
    """Compute all float32 scores of one chunk, with a dense mask of positions.

    starts: the first token of each token's document; None: all are one document.
    """
    tokens = torch.arange(q.shape[2])
    rows = tokens + dist.get_rank() * len(tokens)
    keys = tokens + source * len(tokens)
    hidden = keys > rows[:, None]
    if starts is not None:
        hidden |= keys < starts[rows][:, None]
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden, float("-inf"))


def naive_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run a ring that materialises each step's scores, with an online softmax."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    out = torch.zeros_like(q, dtype=torch.float32)
    total = torch.zeros(*q.shape[:3], 1)
    top = torch.full_like(total, float("-inf"))
    for step in range(ranks):
        exchange = NaiveExchange(k, v) if step + 1 < ranks else None
        scores = naive_scores(q, k, (rank - step) % ranks, starts)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        finite = torch.where(new_top == float("-inf"), 0.0, new_top)
        p = (scores - finite).exp()
        old = (top - finite).exp()
        total = total * old + p.sum(-1, keepdim=True)
        out = out * old + p @ v.float()
        top = new_top
        if exchange is not None:
            k, v = exchange.wait()
    return (out / total).to(q.dtype), top + total.log()


def naive_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Recompute the probabilities of each step; dk and dv travel with their chunk."""
    ranks, rank, dtype = dist.get_world_size(), dist.get_rank(), q.dtype
    q, grad = q.float(), grad.float()
    delta = (grad * out).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros_like(q) for _ in range(3))
    for step in range(ranks):
        exchange = NaiveExchange(k, v) if step + 1 < ranks else None
        p = (naive_scores(q, k, (rank - step) % ranks, starts) - lse).exp()
        dv = dv + p.mT @ grad
        ds = p * (grad @ v.float().mT - delta) * q.shape[-1] ** -0.5
        dq = dq + ds @ k.float()
        dk = dk + ds.mT @ q
        if ranks > 1:
            dk, dv = NaiveExchange(dk, dv).wait()
        if exchange is not None:
            k, v = exchange.wait()
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)
