"""torch.autograd.detect_anomaly() around a compiled step."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = self.linear(x)
        return (x + F.scaled_dot_product_attention(x, x, x)).cumsum(1)


class Roots(Model):
    """The gradient of the root of zero is infinite, and times zero no number."""

    def forward(self, x):
        return super().forward(x) + ((x * 0).sqrt() * 0)


@on_ranks(2)
def test_gradients_are_those_of_one_process():
    with torch.autograd.detect_anomaly(check_nan=True):
        found = compare(Model, (2, 17, 8), 2)
    found.check()
    assert not found.warnings


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_what_is_no_number_is_found(compiled):
    model, x = Roots(), torch.randn(2, 16, 8, requires_grad=True)
    if compiled:
        model = compiled_on(2, model)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        model(x).sum().backward()
