"""A part of a bias of positions is one of the bias of pairs, and so is its gradient."""

from __future__ import annotations

import pytest
import torch

from cpcompile.geometry.mask_blocks import Part, Span
from cpcompile.ops.steps.position_bias import (
    PositionBias,
    add_bias_gradient,
    own_bias,
    zero_bias_gradient,
)
from tests.support.position_biases import of_pairs

QUERIES, KEYS = 13, 17
ROWS = (Span(2, 0, 4), Span(9, 4, 3))  # rows 2 to 5 and 9 to 11, as in zigzag
PARTS = [
    (Part(0, 4, 0, KEYS, 0, True), 2),
    (Part(1, 2, 5, 3, 5, False), 3),
    (Part(4, 3, 0, 6, 7, True), 9),
    (Part(5, 1, 2, 1, 16, True), 10),
]


def table(numbers: int, shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numbers)
    size = (*shape, numbers)
    return torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("numbers", [KEYS, QUERIES + KEYS - 1])
@pytest.mark.parametrize(("part", "row"), PARTS)
def test_parts_and_gradients(numbers, shape, part, row):
    bias = table(numbers, shape).requires_grad_()
    given = own_bias(bias.detach(), ROWS, (QUERIES, KEYS))
    assert isinstance(given, PositionBias)
    pairs = of_pairs(bias, QUERIES, KEYS).expand(*shape, QUERIES, KEYS)
    keys = slice(part.position, part.position + part.keys)
    expected = pairs[:, :, row : row + part.rows, keys]
    assert torch.equal(given.of_part(part), expected)

    ds = torch.randn(2, 3, part.rows, part.keys, dtype=torch.float64)
    (grad,) = torch.autograd.grad(expected.expand(2, 3, -1, -1), bias, ds)
    total = zero_bias_gradient(ds, given, True)
    add_bias_gradient(total, given, part, ds)
    torch.testing.assert_close(total, grad, rtol=0, atol=1e-12)


def test_gradients_are_added_in_the_accumulation_dtype():
    bias = table(KEYS, (1, 1)).bfloat16()
    given = own_bias(bias, ROWS, (QUERIES, KEYS))
    total = zero_bias_gradient(bias, given, True)
    assert total.dtype == torch.float32 and not total.any()
    assert zero_bias_gradient(bias, given, False).numel() == 0
