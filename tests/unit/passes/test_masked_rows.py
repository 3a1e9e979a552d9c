"""The functional form of a masked write equals the write, with its gradients."""

import random

import pytest
import torch

from cpcompile.passes.model.mutation.masked_rows import write_rows, write_rows_

row_numbers = torch.ops.cp.row_numbers.default


def leaves(*shapes):
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_masked_write(seed, in_place, accumulate):
    """Dimensions in front of the mask and after it; rows that are broadcast."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    counts = (seed % 3, seed % 2, draw.randint(0, 2))
    front, more, back = ([draw.randint(1, 3) for _ in range(n)] for n in counts)
    mask = torch.rand([4, *more]) < 0.6
    count = int(mask.sum())
    rows = draw.choice([count, count, 1])
    shape = [*front, rows, *back][draw.choice([0, 0, len(front)]) :]
    x, value = leaves([*front, *mask.shape, *back], shape)
    index = (*[slice(None)] * len(front), mask)
    wanted = x.clone()
    if accumulate:
        wanted[index] = wanted[index] + value
    else:
        wanted[index] = value
    numbers = None if rows == 1 else row_numbers(mask, rows, True, False, "")
    write = write_rows_ if in_place else write_rows
    result = write(x.clone(), mask, numbers, value, len(front), accumulate)
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    weight = torch.randn_like(result)
    for mine, theirs in zip(
        torch.autograd.grad((result * weight).sum(), (x, value)),
        torch.autograd.grad((wanted * weight).sum(), (x, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_infinite_gradients_stay_where_they_belong():
    """A row that is not written gets no gradient of entries that are not written."""
    x, rows = leaves((4, 2), (2, 2))
    mask = torch.tensor([False, True, False, True])
    numbers = row_numbers(mask, 2, True, False, "")
    result = write_rows(x, mask, numbers, rows)
    grad = torch.full_like(result, float("inf"))
    grad[1] = 1.0
    grad[3] = 2.0
    of_x, of_rows = torch.autograd.grad(result, (x, rows), grad)
    assert of_rows.tolist() == [[1, 1], [2, 2]]
    assert of_x[mask].tolist() == [[0, 0], [0, 0]]
