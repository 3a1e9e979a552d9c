"""Random numbers are those that one device draws, in the order of its memory."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.against_one_process import compare
from tests.cpu.on_ranks import on_ranks

sdpa = F.scaled_dot_product_attention


DRAWS = {
    "noise": torch.randn_like,
    "written_noise": lambda x: torch.empty_like(x).normal_(),
    "coins": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "choices": lambda x: F.gumbel_softmax(x, dim=-1),
    "slopes": lambda x: F.rrelu(x, training=True),
    "dropped": lambda x: torch.dropout(x, 0.5, True),
}


class Transposed(nn.Module):
    """The tokens of x lie next to one another where numbers are drawn."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x):
        y = x + sdpa(x, x, x)
        turned = y.mT.contiguous().mT
        return turned + 0.1 * self.draw(turned)


class AfterAttention(Transposed):
    """Heads of the result are last in memory but one, on one device."""

    def forward(self, x):
        q = x.unflatten(2, (2, 4)).transpose(1, 2)
        y = sdpa(q, q, q)
        return (y + 0.1 * self.draw(y)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("make", [Transposed, AfterAttention])
@pytest.mark.parametrize("tokens", [12, 9])
@on_ranks(2)
def test_numbers_are_those_of_one_process(tokens, make, draw):
    options = {"strategy": "ring", "strict": False}
    compare(lambda: make(DRAWS[draw]), (2, tokens, 8), 2, **options).check()
