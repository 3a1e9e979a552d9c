"""torch.func transforms around attention; autograd functions that write."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import func

from tests.cpu.against_one_process import compare, compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.support import fused_losses
from tests.support.fused_losses import LOSSES, WRITES, batch

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


# One of each mechanism; tests/golden/sharding reads the graphs of others.
SOME_WRITES = ("columns", "rows", "backward rows")
SOME_LOSSES = ("scatter_add_", "index_put")


CASES = [
    (world, length, options, kinds)
    for world, length, options in (
        (2, 16, {}),
        (3, 24, {"layout": "zigzag"}),
        (2, 16, {"strict": False}),
        (3, 23, {}),
    )
    for kinds in ("some", "writes", "losses")
] + [(2, 16, {"inner": "inductor"}, "compiled")]
KINDS = {
    "some": SOME_WRITES + SOME_LOSSES,
    "writes": tuple(WRITES),
    "losses": tuple(LOSSES),
    "compiled": ("rows", "index_put_", "backward rows", "scatter_add_", "cat"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "length", "options", "kinds"), CASES)
@on_ranks("world", timeout=290)
def test_functions(world, length, options, kinds):
    for kind in KINDS[kinds]:
        torch.manual_seed(0)
        model = fused_losses.Model(kind if kind in WRITES else LOSSES[kind]).double()
        found = compare_calls(model, [batch(length)], world, **options)
        found.check()
        gathered = [x for x in found.warnings if "on gathered tensors" in x]
        if length % world == 0 and kind in LOSSES:
            assert not gathered, kind
