"""Calls that have a decomposition of their own in programs of masks."""

import pytest
import torch
import torch.nn.functional as F

import tests.unit.masks.mask_builders as b
from cpcompile.passes.model.masks.analysis.decompositions import _padded
from tests.unit.masks.mask_cases import attend, check, operands, read

S = 21


PADS = [
    *((0, 0), (2, 1), (-1, 2), (2, -3), (-1, -2), (-6, 0), (-7, 2)),
    *((1, 0, 0, 2), (0, 0, -1, -1), (0, 0, 0, 0, 1, 1)),
]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_a_pad_is_that_of_torch(pad, value):
    x = torch.randn(3, 5, 7)
    assert torch.equal(_padded(x, pad, value), F.pad(x, pad, value=value))


def test_a_pad_of_nothing():
    x = torch.zeros(2, 0)
    assert torch.equal(_padded(x, (1, 2), 3.0), F.pad(x, (1, 2), value=3.0))


def banded(q, k):
    """x-transformers pads what limits how far back a query sees."""
    i, j = torch.arange(q.shape[-2]), torch.arange(k.shape[-2] - 1)
    seen = (i[:, None] >= j) & (i[:, None] - j <= 8)
    return F.pad(seen, (0, 1), value=False)


def shifted(q, k):
    """A causal mask whose keys begin with one that all see."""
    return F.pad(b.causal_tril(q, k)[:, :-1], (1, 0), value=True)


def padded_bias(q, k, bias):
    """x-transformers: heads without a bias."""
    return F.pad(bias, (0, 0, 0, 0, 0, 1))


def banded_numbers(q, k):
    return torch.where(banded(q, k), 0.0, -torch.inf)


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (banded, "key ranges"),
        (banded_numbers, "key ranges"),
        (shifted, "causal, shifted by 1"),
    ],
)
def test_padded_limits_are_limits(builder, text):
    found = read(attend(builder), *operands(S))
    assert found.text == text
    check(found, *operands(S))


def test_a_padded_bias_is_read_row_by_row():
    bias = torch.randn(1, S, S)
    found = read(attend(padded_bias), *operands(S), bias)
    assert found.text.startswith("dense float32")
    check(found, *operands(S), bias)
