"""Functions under allow_in_graph that take objects, as torchao's float8 layers do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import WIDTH, Base, attend, run_program
from tests.support.bounds import check


class Role(enum.Enum):
    INPUT = "input"


@dataclass(frozen=True)
class Settings:
    scale: Any = 2.0  # a number or a tensor
    role: Role = Role.INPUT


class Nested(NamedTuple):
    factor: float = 0.5
    inner: Settings = Settings(4.0)

    @property
    def scale(self) -> float:
        return self.factor * self.inner.scale


SETTINGS, NESTED = Settings(), Nested()


@torch._dynamo.allow_in_graph
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, settings):
        ctx.save_for_backward(x, weight)
        ctx.settings = settings
        return x @ weight * settings.scale

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad * ctx.settings.scale
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2), None


@torch._dynamo.allow_in_graph
def across(x, weight, *, settings):
    """Read all tokens, which DTensor shards as well as it can."""
    return (x.flip(1) + x.cumsum(1)) @ weight * settings.scale


def in_region(x, weight):
    return checkpoint(
        lambda y: Product.apply(y, weight, SETTINGS).tanh(), x, use_reentrant=False
    )


KINDS = {
    "dataclass": lambda x, w: Product.apply(x, w, SETTINGS),
    "nested": lambda x, w: Product.apply(x, w, NESTED),
    "function": lambda x, w: across(x, w, settings=NESTED),
    "region": in_region,
    "parameter inside": lambda x, w: across(x, w, settings=Settings(w[0])),
    "activation inside": lambda x, w: across(x, w, settings=Settings(x.tanh())),
}


class Model(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = KINDS[self.kind](self.linear(self.embedding(tokens)), self.weight)
        return attend(x).square().mean()


@pytest.mark.parametrize(
    ("seq", "world", "door"), [(16, 2, "plain"), (17, 3, "plain"), (16, 2, "dtensor")]
)
@on_ranks("world")
def test_objects_are_handed_on(seq, world, door):
    for kind in KINDS:
        found, rewritten = run_program(lambda k=kind: Model(k), seq, world, door)
        check(found)
        assert rewritten == [1]
