"""Attention calls in every form that models have, against one process.

Each kind is a function of whole tensors as a user writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import Comparison, compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.support.pairwise import selected_cases

sdpa = F.scaled_dot_product_attention
S, T = 37, 11  # tokens, and those of another sequence


@dataclass(frozen=True)
class Kind:
    """A function of q, k and v, their shapes, and the dimension of the sequence."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int | None, ...]  # None is not sharded

    @classmethod
    def of(cls, call, *shapes, dims=None) -> Kind:
        shapes = shapes if len(shapes) == 3 else shapes * 3
        return cls(call, shapes, dims or tuple(len(shape) - 2 for shape in shapes))


def causal(q, k, v):
    return sdpa(q, k, v, is_causal=True)


def keywords(q, k, v):
    return sdpa(value=v, key=k, query=q, scale=0.3)


def grouped(q, k, v):
    return sdpa(q, k, v, is_causal=True, enable_gqa=True)


def repeated(q, k, v):
    """As Hugging Face repeats key heads."""
    b, g, s, d = k.shape
    k = k[:, :, None, :, :].expand(b, g, 3, s, d).reshape(b, 3 * g, s, d)
    return causal(q, k, v.repeat_interleave(3, 1))


def tiled(q, k, v):
    """Another order of the heads, which must not be folded."""
    return causal(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))


X = (2, 3, S, 8)
KINDS = {
    "keywords": Kind.of(keywords, X),
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
    "repeated": Kind.of(repeated, (2, 6, S, 8), (2, 2, S, 8), (2, 2, S, 8)),
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


class Called(nn.Module):
    """A call whose arguments have names that options can say."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.kind.call(query, key, value)


def compared(
    kind: Kind, strategy: str, world: int, door: str, inner: str = "aot_eager"
) -> Comparison:
    generator = torch.Generator().manual_seed(7)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in kind.shapes
    ]
    options: dict[str, Any] = {"strategy": strategy, "inner": inner, "fullgraph": True}
    if door == "plain":
        dims = zip(("query", "key", "value"), kind.dims, strict=True)
        options["shard"] = {name: dim for name, dim in dims if dim is not None}
    return compare_calls(Called(kind), [inputs], world, door, dims=kind.dims, **options)


AXES = {
    "kind": tuple(KINDS),
    "strategy": ("ring", "all_gather", "ulysses"),
    "world": (2, 3),
    "door": ("plain", "dtensor"),
}
CASES = [
    (*values.values(), "aot_eager")
    for values in selected_cases(AXES)
    if values["door"] == "plain" or values["kind"] not in PLAIN_ONLY
]
CASES += [
    (name, AXES["strategy"][number % 3], 2, "plain", "inductor")
    for number, name in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "strategy", "world", "door", "inner"), CASES)
@on_ranks("world")
def test_forward_and_gradients(name, strategy, world, door, inner):
    found = compared(KINDS[name], strategy, world, door, inner)
    found.check()
    assert found.rewritten == [True]


def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(q, k, v, 0.0, True)[0]


@on_ranks(2)
def test_a_kernel_that_is_called_by_its_name_is_right():
    """It is no call that a strategy is chosen for, see ops/dtensor/dtensor_sdpa.py."""
    compared(Kind.of(kernel, X), "auto", 2, "plain").check()
