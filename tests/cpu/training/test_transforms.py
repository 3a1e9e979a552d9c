"""torch.func transforms around attention."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import func

from tests.cpu.against_one_process import compare
from tests.cpu.on_ranks import on_ranks

TRANSFORMED = {
    "vmap": lambda x: func.vmap(lambda row: row * 2)(x),
    "cumsum": lambda x: func.vmap(lambda row: row.cumsum(0))(x),
    "mean of tokens": lambda x: func.vmap(lambda row: row - row.mean(0))(x),
    "over tokens": lambda x: func.vmap(lambda t: t.softmax(-1), 1, 1)(x),
    "twice": lambda x: func.vmap(func.vmap(lambda t: t / t.norm()))(x),
    "grad": lambda x: func.grad(lambda y: y.sin().sum())(x),
    "grad per row": lambda x: func.vmap(func.grad(lambda y: (y * y.mean(0)).sum()))(x),
    "jvp": lambda x: func.jvp(torch.sin, (x,), (x.cos(),))[1],
    "vjp": lambda x: func.vjp(lambda y: y.sin() * 2, x)[1](x.cos())[0],
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.name = name

    def forward(self, x):
        x = self.linear(x)
        return F.scaled_dot_product_attention(x, x, x) + TRANSFORMED[self.name](x)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("name", TRANSFORMED)
@on_ranks(2)
def test_transforms_are_those_of_one_process(name, door):
    compare(lambda: Model(name), (2, 17, 8), 2, door).check()
