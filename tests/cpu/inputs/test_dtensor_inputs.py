"""Models whose inputs are DTensors, which Dynamo traces before a backend is called."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import cpcompile as cp
from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviations, step

WIDTH = 8


class Convolution(nn.Module):
    """Between two views; the sequence is the width of the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        y = y.view(*y.shape[:2], 2, 4).transpose(1, 2)
        return x + F.scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)


class WritesToPlain(nn.Module):
    """Keys and values are written into tensors that the model makes."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        cache = torch.zeros(x.shape[0], x.shape[1] + 4, WIDTH, dtype=x.dtype)
        if self.write == "copy":
            cache[:, 2:-2] = x
        else:
            cache[:, 2:-2].add_(x)
        return F.scaled_dot_product_attention(x, cache, cache)


class MaskAlone(nn.Module):
    """Attention of a parameter, where the mask alone comes of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(2, 1, 16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        seen = x[:, None, None, :, 0] > 0
        y = F.scaled_dot_product_attention(*3 * (self.latents,), attn_mask=seen)
        return x + y.squeeze(1)


MODELS = {
    "convolution": Convolution,
    "copy": lambda: WritesToPlain("copy"),
    "add": lambda: WritesToPlain("add"),
    "mask": MaskAlone,
}


@pytest.mark.parametrize("name", MODELS)
def test_what_dtensor_has_no_rule_for(pools, name):
    for got in pools[2].run(compare_model, name):
        got.check()


def compare_model(name):
    return compare(MODELS[name], (2, 16, WIDTH), 2, "dtensor")


class Padded(nn.Module):
    """Documents and padding in one mask, with a bias that wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(9, 1)

    def forward(self, x: Tensor, documents: Tensor, padding: Tensor) -> Tensor:
        seen = documents[:, :, None] == documents[:, None, :]
        seen = seen & padding[:, None, :]
        rows = torch.arange(x.shape[1])
        bias = self.bias((rows[:, None] - rows).clamp(-4, 4) + 4).permute(2, 0, 1)
        bias = bias.masked_fill(~seen, -torch.inf)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias).square().mean()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_booleans_are_gathered(pools, inner):
    """Inductor's own lowering makes int64 of them, and fails where they are read."""
    for found in pools[2].run(padded_step, inner, timeout=170):
        check(found)


def padded_step(inner: str) -> list[Deviation]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = Padded().double(), sequence_mesh(2)
    x = torch.randn(2, 24, WIDTH, dtype=torch.float64)
    documents = (torch.rand(2, 24) < 0.2).cumsum(1)
    padding = torch.arange(24).expand(2, 24) < torch.tensor([[24], [20]])
    given = (x, documents, padding)
    compiled = torch.compile(
        copy.deepcopy(model), backend="cp", options={"inner": inner}
    )
    return _compared(model, compiled, given, tuple(cp.shard(t, mesh, 1) for t in given))


class OneHead(nn.Module):
    """Attention without a dimension of heads, of sequences that lie in dimension 0."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        convolves = kind == "convolution"
        self.linear = (
            nn.Conv1d(WIDTH, WIDTH, 1) if convolves else nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, mask = x.transpose(0, 1), None
        if self.kind == "convolution":
            y = self.linear(y.transpose(1, 2)).transpose(1, 2)
        else:
            y = self.linear(y)
        if self.kind == "mask":  # plain sizes that are symbols meet a DTensor
            rows = torch.arange(y.shape[1])
            seen = (y[:, :, :1] < y[:, :, :1].mT + 9.0) & (rows[:, None] >= rows)
            mask = torch.zeros(seen.shape, dtype=y.dtype).masked_fill(~seen, -torch.inf)
        q = F.normalize(y, dim=-1)
        y = F.scaled_dot_product_attention(q, y, y, attn_mask=mask)
        if self.kind == "token":  # a view of which only a stride is a symbol
            y = y[:, y.shape[1] // 2]
        return y.square().mean()


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("kind", ["linear", "convolution", "mask", "token"])
@pytest.mark.parametrize("lengths", [(31, 20), (8, 12)])
def test_a_second_length(pools, door, kind, lengths):
    """Dynamo hands symbols for sizes then; where one is needed they get their value."""
    for found in pools[2].run(second_length, door, kind, lengths):
        check(found)


@pytest.mark.parametrize("kind", ["linear", "mask"])
def test_a_second_length_that_leaves_one_rank_its_part(pools, kind):
    """The last of three ranks has 4 tokens of 16, and of 12."""
    args = (second_length, "dtensor", kind, (16, 12, 21), 3)
    for found in pools[3].run(*args, timeout=170):
        check(found)


def second_length(
    door: str, kind: str, lengths: tuple[int, ...], world: int = 2
) -> list[Deviation]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, mesh = OneHead(kind).double(), sequence_mesh(world)
    options = {"inner": "aot_eager"}
    if door == "plain":
        options |= {"mesh": mesh, "shard": {"x": 0}}
    compiled = torch.compile(copy.deepcopy(model), backend="cp", options=options)
    found = []
    for length in lengths:
        x = torch.randn(length, 2, WIDTH, dtype=torch.float64)
        given = x if door == "plain" else cp.shard(x, mesh, 0)
        found += _compared(model, compiled, (x,), (given,))
    return found


def _compared(model: nn.Module, compiled, alone, given) -> list[Deviation]:
    """Of the loss and the gradients of a step; both have their own parameters."""
    own = compiled._orig_mod
    return deviations(step(compiled, own, *given), step(model, model, *alone))
