"""Blocks that add up into one value in the backward, compiled by Inductor."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, in_one_process

TOKENS, WIDTH = 24, 8


def rotary(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 0.5 ** torch.arange(half, dtype=x.dtype)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    a, b, cos, sin = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    """Three products of one kind, which are folded into three calls of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(0, 1)
        parts = [torch.einsum("btc,cd->btd", x, w) / 2.8 for w in self.qkv]
        q, k, v = (part.unflatten(2, (1, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        return (x + y.transpose(1, 2).flatten(2)).square().mean()


def gradients(model: nn.Module, called: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the parameters of a model; called: the same, or what it is compiled to."""
    model.zero_grad()
    called(x).backward()
    return {f"grad of {name}": p.grad for name, p in model.named_parameters()}


@pytest.mark.timeout(240)
@on_ranks(2, timeout=200)
def test_no_operand_of_a_function_is_written_into() -> None:
    """Its memory belongs to the caller, who uses it again (torch_fixes.md)."""
    model, x = Model().double(), torch.randn(TOKENS, 3, WIDTH).double()
    want = in_one_process(lambda alone: gradients(alone, alone, x), model)
    compiled = compiled_on(2, model, inner="inductor", strategy="ring")
    check(deviations(gradients(model, compiled, x), *want))
