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


def run_in_anomaly_mode(make):
    with torch.autograd.detect_anomaly(check_nan=True):
        return compare(make, (2, 17, 8), 2)


@on_ranks(2)
def test_gradients_are_those_of_one_process():
    found = run_in_anomaly_mode(Model)
    found.check()
    assert not found.warnings


def run_to_nan(compiled: bool) -> str:
    torch._dynamo.reset()
    model, x = Roots(), torch.randn(2, 16, 8, requires_grad=True)
    if compiled:
        model = compiled_on(2, model)
    with torch.autograd.detect_anomaly():
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_what_is_no_number_is_found(compiled):
    assert "returned nan values" in run_to_nan(compiled)
