"""Models whose inputs are DTensors, which Dynamo traces before a backend is called."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.against_one_process import compare, compare_calls
from tests.cpu.on_ranks import on_ranks

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
@on_ranks(2)
def test_what_dtensor_has_no_rule_for(name):
    compare(MODELS[name], (2, 16, WIDTH), 2, "dtensor").check()


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
@on_ranks(2)
def test_booleans_are_gathered(inner):
    """Inductor's own lowering makes int64 of them, and fails where they are read."""
    documents = (torch.rand(2, 24) < 0.2).cumsum(1)
    padding = torch.arange(24).expand(2, 24) < torch.tensor([[24], [20]])
    calls = [(torch.randn(2, 24, WIDTH, dtype=torch.float64), documents, padding)]
    compare_calls(Padded().double(), calls, 2, "dtensor", inner=inner).check()


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


# Of three ranks the last has 4 tokens of 16, and of 12.
LENGTHS = [
    *(
        (kind, door, lengths, 2)
        for kind in ("linear", "convolution", "mask", "token")
        for door in ("plain", "dtensor")
        for lengths in ((31, 20), (8, 12))
    ),
    *((kind, "dtensor", (16, 12, 21), 3) for kind in ("linear", "mask")),
]


@pytest.mark.parametrize(("kind", "door", "lengths", "world"), LENGTHS)
@on_ranks("world")
def test_a_second_length(kind, door, lengths, world):
    """Dynamo hands symbols for sizes then; where one is needed they get their value."""
    calls = [(torch.randn(n, 2, WIDTH, dtype=torch.float64),) for n in lengths]
    named = {"shard": {"x": 0}} if door == "plain" else {}
    model = OneHead(kind).double()
    compare_calls(model, calls, world, door, dims=(0,), **named).check()
