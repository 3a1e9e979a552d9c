"""The attentions that bench.py compares, each as forward and backward.

All run causal attention on this rank's shards [B, H, tokens, D] and return local
results. `layout` names the tokens that a shard holds: "contiguous", "head_tail" (chunks
r and 2 N - 1 - r of 2 N) or "whole" (all of them, on rank 0 only).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Private functions and switches of torch's context parallelism, seen in torch 2.13.
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

import cpcompile.ops  # noqa: F401  registers the operators

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peer:
    """forward(q, k, v) gives (out, *saved); backward(grad, q, k, v, out, *saved)."""

    name: str
    layout: str
    forward: Forward
    backward: Backward
    threads: int = 1


def all_peers() -> list[Peer]:
    """What is measured, in the order in which one repetition runs it."""
    return [
        ours("ring"),
        ours("all_gather"),
        ours("ring", "zigzag"),
        ours("all_gather", "zigzag"),
        torch_ring("torch_ring", False, _RotateMethod.ALL_TO_ALL),
        torch_ring("torch_ring_all_gather", False, _RotateMethod.ALL_GATHER),
        torch_ring("torch_ring_balanced", True, _RotateMethod.ALL_TO_ALL),
        Peer("naive_loop", "contiguous", naive_forward, naive_backward),
        Peer("two_threads", "whole", whole_forward, whole_backward, threads=2),
    ]


def ours(strategy: str, layout: str = "contiguous") -> Peer:
    """A cp:: operator and its backward."""

    def rest(q: Tensor) -> tuple[int, int, bool, float, str]:
        length = q.shape[2] * dist.get_world_size()
        assert dist.group.WORLD is not None, "the process group is initialised"
        return length, length, True, q.shape[-1] ** -0.5, dist.group.WORLD.group_name

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        op = getattr(torch.ops.cp, f"{strategy}_attention")
        result: tuple[Tensor, ...] = op(q, k, v, *rest(q), layout=layout)
        return result

    def backward(grad: Tensor, q: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        op = getattr(torch.ops.cp, f"{strategy}_attention_backward")
        dq, dk, dv, _ = op(grad, q, *others, *rest(q), layout=layout)
        return dq, dk, dv

    if layout == "zigzag":  # head-tail, if two chunks per rank divide the length
        return Peer(f"cp_{strategy}_zigzag", "head_tail", forward, backward)
    return Peer(f"cp_{strategy}", layout, forward, backward)


def torch_ring(name: str, balanced: bool, rotate: _RotateMethod) -> Peer:
    """torch.distributed's ring templates around aten's CPU flash kernel."""

    def configure() -> dist.ProcessGroup:
        _cp_options.enable_load_balance = balanced
        _cp_options.rotate_method = rotate
        assert dist.group.WORLD is not None, "the process group is initialised"
        return dist.group.WORLD

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return _templated_ring_attention(
            configure(),
            2,
            aten._scaled_dot_product_flash_attention_for_cpu,
            q,
            k,
            v,
            is_causal=True,
        )

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        return _templated_ring_attention_backward(
            configure(),
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            True,
            dropout_p=0.0,
        )

    return Peer(name, "head_tail" if balanced else "contiguous", forward, backward)


def whole_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """One process, the whole sequence; autograd keeps what backward needs."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out, q, k, v


def whole_backward(
    grad: Tensor,
    _q: Tensor,
    _k: Tensor,
    _v: Tensor,
    out: Tensor,
    *leaves: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of `whole_forward`."""
    return torch.autograd.grad(out, leaves, grad)


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
        """What the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


def naive_scores(q: Tensor, k: Tensor, source: int) -> Tensor:
    """All float32 scores of one chunk, with a dense mask of positions."""
    tokens = torch.arange(q.shape[2])
    rows = tokens + dist.get_rank() * len(tokens)
    keys = tokens + source * len(tokens)
    scores = (q.float() @ k.float().mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(keys > rows[:, None], float("-inf"))


def naive_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """A ring that materialises the scores of each step, with an online softmax."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    out = torch.zeros_like(q, dtype=torch.float32)
    total = torch.zeros(*q.shape[:3], 1)
    top = torch.full_like(total, float("-inf"))
    for step in range(ranks):
        exchange = NaiveExchange(k, v) if step + 1 < ranks else None
        scores = naive_scores(q, k, (rank - step) % ranks)
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
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    """Recomputes the probabilities of each step; dk and dv travel with their chunk."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    delta = (grad * out).sum(-1, keepdim=True)
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    for step in range(ranks):
        exchange = NaiveExchange(k, v) if step + 1 < ranks else None
        p = (naive_scores(q, k, (rank - step) % ranks) - lse).exp()
        dv = dv + p.mT @ grad
        ds = p * (grad @ v.mT - delta) * q.shape[-1] ** -0.5
        dq = dq + ds @ k
        dk = dk + ds.mT @ q
        if ranks > 1:
            dk, dv = NaiveExchange(dk, dv).wait()
        if exchange is not None:
            k, v = exchange.wait()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
