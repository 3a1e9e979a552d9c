"""The attentions that bench.py compares, each as forward and backward.

All run on this rank's shards [B, H, tokens, D] and return local results. `layout` names
the tokens that a shard holds: "contiguous", "head_tail" (chunks r and 2 N - 1 - r of
2 N) or "whole" (all of them, on rank 0 only).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

# Private functions and switches of torch's context parallelism, seen in torch 2.13.
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.cost.plans import Strategy
from cpcompile.geometry.layout import Layout
from cpcompile.ops.attention_spec import AttentionSpec
from tools.bench.peers import documents
from tools.bench.peers.documents import Mask
from tools.bench.peers.naive import naive_backward, naive_forward

aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
Backward = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Peer:
    """An attention to compare, as forward and backward.

    forward(q, k, v) gives (out, *saved); backward takes (grad, q, k, v, out, *saved).
    threads: of a process. tokens_first: operands and results are [B, tokens, H, D].
    slow: whether it is so much slower than others that it needs few repetitions.
    """

    name: str
    layout: str
    forward: Forward
    backward: Backward
    threads: int = 1
    tokens_first: bool = False
    slow: bool = False


class LeftOut(Exception):
    """A peer cannot take part; the text says why."""


@dataclass(frozen=True)
class Offer:
    """A peer that is made when it is needed; `make` raises LeftOut if it cannot be."""

    name: str
    make: Callable[[Mask], Peer]


OURS = {
    "cp_ring_zigzag": (Strategy.RING, Layout.ZIGZAG),
    "cp_all_gather_zigzag": (Strategy.ALL_GATHER, Layout.ZIGZAG),
    "cp_ulysses": (Strategy.ULYSSES, Layout.CONTIGUOUS),
}
NAIVE, ONE_PROCESS = "naive_loop", "one_process"


def own_offers() -> Iterator[Offer]:
    """Yield what needs no other package, in the order in which a repetition runs it."""
    for name in OURS:
        yield Offer(name, lambda mask, name=name: ours(name, mask))
    rotations = {
        "torch_ring": (False, _RotateMethod.ALL_TO_ALL),
        "torch_ring_all_gather": (False, _RotateMethod.ALL_GATHER),
        "torch_ring_balanced": (True, _RotateMethod.ALL_TO_ALL),
    }
    for name, how in rotations.items():
        yield Offer(name, lambda mask, name=name, how=how: torch_ring(name, mask, *how))
    yield Offer(NAIVE, naive)
    yield Offer(ONE_PROCESS, one_process)


def by_autograd(
    name: str,
    layout: str,
    attend: Attend,
    tokens_first: bool = False,
    slow: bool = False,
) -> Peer:
    """Make a peer of `attend`, with a backward by autograd."""

    def forward(*qkv: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        return attend(*leaves), *leaves

    def backward(grad: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        _, _, _, out, *leaves = saved
        return torch.autograd.grad(out, leaves, grad)

    return Peer(name, layout, forward, backward, 1, tokens_first, slow)


def ours(name: str, mask: Mask) -> Peer:
    """Make a peer that calls the operator `name` of OURS as compiled programs do."""
    strategy, layout = OURS[name]
    operator = getattr(torch.ops.cp, f"{strategy.value}_attention")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens, causal = q.shape[2] * dist.get_world_size(), mask is Mask.CAUSAL
        spec = AttentionSpec(q.shape[-1] ** -0.5, causal, layout)
        masks = {} if causal else {"key_ranges": documents.key_ranges(tokens)}
        spec, extras = spec.with_extras(masks)
        sizes = [tokens, tokens]
        out: Tensor = operator(q, k, v, extras, sizes, str(spec), world().group_name)[0]
        return out

    # Zigzag is head-tail, where two chunks per rank divide the length.
    where = "head_tail" if layout is Layout.ZIGZAG else layout.value
    return by_autograd(name, where, attend)


def torch_ring(name: str, mask: Mask, balanced: bool, rotate: _RotateMethod) -> Peer:
    """Make a peer of torch.distributed's ring templates around aten's CPU kernel."""
    if mask is not Mask.CAUSAL:
        raise LeftOut("its ring around scaled_dot_product_attention takes no mask")

    def configure() -> dist.ProcessGroup:
        _cp_options.enable_load_balance = balanced
        _cp_options.rotate_method = rotate
        return world()

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

    # Without balance the last rank has half as much again to do: never the fastest.
    where = "head_tail" if balanced else "contiguous"
    return Peer(name, where, forward, backward, slow=not balanced)


def naive(mask: Mask) -> Peer:
    """Make a ring in plain PyTorch; documents are masked, and computed."""

    def forward(*qkv: Tensor) -> tuple[Tensor, ...]:
        return naive_forward(*qkv, starts=starts_of(qkv[0]))

    def backward(*operands: Tensor) -> tuple[Tensor, ...]:
        return naive_backward(*operands, starts=starts_of(operands[1]))

    def starts_of(q: Tensor) -> Tensor | None:
        whole = q.shape[2] * dist.get_world_size()
        return None if mask is Mask.CAUSAL else documents.starts(whole)

    return Peer(NAIVE, "contiguous", forward, backward, slow=True)


def one_process(mask: Mask) -> Peer:
    """Make a peer that runs the whole sequence on rank 0, with a thread per rank."""
    alone = by_autograd(ONE_PROCESS, "whole", documents.attend(mask))
    return replace(alone, threads=dist.get_world_size())


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "the process group is initialised"
    return dist.group.WORLD
