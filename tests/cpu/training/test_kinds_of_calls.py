"""Attention calls in every form that models have, against one process.

Each kind is a function of whole tensors as a user writes it. References and tolerances
are those of Note [Derived tolerances] in attention_cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh, tolerance
from tests.support.bounds import check, deviation
from tests.support.pairwise import selected_cases

sdpa = F.scaled_dot_product_attention
S, T = 37, 11  # tokens, and those of another sequence


@dataclass(frozen=True)
class Kind:
    """A function of q, k and v, their shapes, and the dimension of the sequence."""

    call: Callable[..., Tensor]
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dims: tuple[int | None, int | None, int | None]  # None is not sharded

    @classmethod
    def of(cls, call, *shapes, dims=None) -> Kind:
        q, k, v = shapes if len(shapes) == 3 else shapes * 3
        of_tokens = tuple(len(shape) - 2 for shape in (q, k, v))
        return cls(call, q, k, v, of_tokens if dims is None else dims)


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def positional(q, k, v):
    return sdpa(q, k, v, None, 0.0, True, scale=0.3)


def keywords(q, k, v):
    return sdpa(value=v, key=k, query=q)


def overload(q, k, v):
    return torch.ops.aten.scaled_dot_product_attention.default(q, k, v, None, 0.0, True)


def grouped(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def projected(q, k, v):
    """[B, S, C]; one fused projection, whose parts are not contiguous."""
    weight = torch.eye(24, dtype=q.dtype).repeat(3, 1)
    qkv = F.linear(q + k * 0.5 + v, weight)
    parts = (x.view(*x.shape[:2], 3, 8).transpose(1, 2) for x in qkv.split(24, dim=-1))
    return causal(*parts).transpose(1, 2).flatten(2)


def repeated(q, k, v):
    """As Hugging Face repeats key heads."""
    b, g, s, d = k.shape
    k = k[:, :, None, :, :].expand(b, g, 3, s, d).reshape(b, 3 * g, s, d)
    return causal(q, k, v.repeat_interleave(3, 1))


def repeated_early(q, k, v):
    """As torchtitan does, in [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    b, s, g, d = k.shape
    k = k.unsqueeze(3).expand(b, s, g, 3, d).reshape(b, s, 3 * g, d)
    v = v.repeat_interleave(3, dim=2)
    return causal(*(x.transpose(1, 2) for x in (q, k, v)))


def tiled(q, k, v):
    """Another order of the heads, which must not be folded."""
    return causal(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))


X = (2, 3, S, 8)
KINDS = {
    "positional": Kind.of(positional, X),
    "keywords": Kind.of(keywords, X),
    "overload": Kind.of(overload, X),
    "one head": Kind.of(causal, (1, 1, S, 8)),
    "three dims": Kind.of(causal, (4, S, 8)),
    "two dims": Kind.of(causal, (S, 8)),
    "five dims": Kind.of(causal, (2, 2, 3, S, 8)),
    "five dims, one key head": Kind.of(
        keywords, (2, 2, 3, S, 8), (2, 2, 1, S, 8), (2, 2, 1, S, 8)
    ),
    "grouped": Kind.of(grouped, (2, 6, S, 8), (2, 2, S, 8), (2, 2, S, 8)),
    "one key head": Kind.of(causal, X, (2, 1, S, 8), (2, 1, S, 8)),
    "one head of values": Kind.of(causal, X, X, (2, 1, S, 8)),
    "one batch of keys": Kind.of(causal, X, (1, 3, S, 8), (1, 3, S, 8)),
    "one batch of queries": Kind.of(keywords, (1, 3, S, 8), X, X),
    "three dims, one batch of keys": Kind.of(keywords, (4, S, 8), (1, S, 8), (1, S, 8)),
    "smaller values": Kind.of(causal, (2, 3, S, 24), (2, 3, S, 24), (2, 3, S, 16)),
    "larger values": Kind.of(causal, X, X, (2, 3, S, 16)),
    "fused projection": Kind.of(projected, (2, S, 24)),
    "repeated": Kind.of(repeated, (2, 6, S, 8), (2, 2, S, 8), (2, 2, S, 8)),
    "repeated early": Kind.of(repeated_early, (2, 6, S, 8), (2, 2, S, 8), (2, 2, S, 8)),
    "tiled": Kind.of(tiled, (2, 6, S, 8), (2, 2, S, 8), (2, 2, S, 8)),
    "cross": Kind.of(keywords, X, (2, 3, T, 8), (2, 3, T, 8)),
    "cross, whole keys": Kind.of(
        keywords, X, (2, 3, T, 8), (2, 3, T, 8), dims=(2, None, None)
    ),
    "cross, causal": Kind.of(causal, X, (2, 3, T, 8), (2, 3, T, 8)),
    "cross, causal, more keys": Kind.of(causal, (2, 3, T, 8), X, X),
    "cross, whole queries": Kind.of(causal, (2, 3, T, 8), X, X, dims=(None, 2, 2)),
}

# Dynamo runs these on DTensors, outside of any backend, where torch has no rule.
PLAIN_ONLY = {"two dims", "cross, whole keys", "cross, whole queries"}


def make_inputs(kind: Kind, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = (kind.q, kind.k, kind.v)
    return [
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in shapes
    ]


def results(fn: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a sum that weighs all elements differently."""
    out = fn(*inputs)
    whole = out.full_tensor() if isinstance(out, DTensor) else out
    weights = torch.arange(whole.numel()).view(whole.shape).cos().to(whole.dtype)
    grads = torch.autograd.grad((whole * weights).sum(), inputs)
    grads = [x.full_tensor() if isinstance(x, DTensor) else x for x in grads]
    return [whole.detach(), *grads]


def run_kind(
    name: str, strategy: str, world: int, door: str, inner: str
) -> tuple[list[Tensor], list[bool]]:
    """The results on this rank, and which of the calls were rewritten."""
    torch._dynamo.reset()
    kind, mesh = KINDS[name], sequence_mesh(world)
    inputs = make_inputs(kind, torch.float32)
    options = {"strategy": strategy, "inner": inner}

    def attend(query, key, value):
        return kind.call(query, key, value)

    if door == "plain":
        dims = zip(("query", "key", "value"), kind.dims, strict=True)
        options |= {"mesh": mesh, "shard": {n: d for n, d in dims if d is not None}}
    else:
        inputs = [
            cp.shard(x.detach(), mesh, dim).requires_grad_()
            for x, dim in zip(inputs, kind.dims, strict=True)
        ]
    function = torch.compile(attend, backend="cp", options=options, fullgraph=True)
    with recording() as reports:
        got = results(function, inputs)
    return got, [c.plan is not None for r in reports for c in r.calls]


def check_kind(kind: Kind, got: list[Tensor], rank: int) -> None:
    exact = results(kind.call, make_inputs(kind, torch.float64))
    plain = results(kind.call, make_inputs(kind, torch.float32))
    names = [f"{x} on rank {rank}" for x in ("out", "dq", "dk", "dv")]
    found = zip(names, got, exact, map(tolerance, exact, plain), strict=True)
    check([deviation(name, x, y, limit=limit) for name, x, y, limit in found])


AXES = {
    "kind": tuple(KINDS),
    "strategy": ("ring", "all_gather", "ulysses"),
    "world": (2, 3),
    "door": ("plain", "dtensor"),
}


@pytest.mark.parametrize(
    "values",
    [
        values
        for values in selected_cases(AXES)
        if values["door"] == "plain" or values["kind"] not in PLAIN_ONLY
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_forward_and_gradients(pools, values):
    name, *rest = values.values()
    runs = pools[values["world"]].run(run_kind, name, *rest, "aot_eager", timeout=60)
    for rank, (got, rewritten) in enumerate(runs):
        assert rewritten == [True]
        check_kind(KINDS[name], got, rank)


STRATEGIES = ("ring", "all_gather", "ulysses")


@pytest.mark.parametrize("name", KINDS)
def test_with_inductor(pools, name):
    strategy = STRATEGIES[list(KINDS).index(name) % len(STRATEGIES)]
    args = (run_kind, name, strategy, 2, "plain", "inductor")
    for rank, (got, rewritten) in enumerate(pools[2].run(*args, timeout=120)):
        assert rewritten == [True]
        check_kind(KINDS[name], got, rank)


def run_kernel() -> list[Tensor]:
    """The operator behind scaled_dot_product_attention, called by its name."""
    torch._dynamo.reset()
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    options = {"mesh": sequence_mesh(2), "shard": {"query": 2, "key": 2, "value": 2}}

    def attend(query, key, value):
        return kernel(query, key, value, 0.0, True)[0]

    inputs = make_inputs(KINDS["positional"], torch.float32)
    options |= {"inner": "aot_eager"}
    return results(torch.compile(attend, backend="cp", options=options), inputs)


def test_a_kernel_that_is_called_by_its_name_is_right(pools):
    """It is no call that a strategy is chosen for, see ops/dtensor/dtensor_sdpa.py."""
    for rank, got in enumerate(pools[2].run(run_kernel, timeout=60)):
        check_kind(Kind.of(causal, X), got, rank)
