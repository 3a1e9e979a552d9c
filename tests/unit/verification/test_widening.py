"""What asks for float32 computes in float64, and grouped rows are their products."""

import pytest
import torch
import torch.nn.functional as F

from cpcompile.apps.verification.widening import Widened, grouped_product


def test_casts_and_new_tensors_are_of_float64():
    x = torch.randn(3, 4, dtype=torch.float64)
    with Widened():
        made = [x.float(), x.to(torch.bfloat16), x.half(), x.type(torch.float32)]
        made += [torch.zeros(2, dtype=torch.float32), x.softmax(-1, dtype=torch.float)]
        counted = torch.arange(3, dtype=torch.int32)
    assert {y.dtype for y in made} == {torch.float64}
    assert torch.equal(made[1], x)
    assert counted.dtype == torch.int32


def operands(dtype, dims):
    torch.manual_seed(0)
    a = torch.randn(*(9, 16) if dims == 2 else (3, 4, 16), dtype=dtype)
    b = torch.randn(3, 16, 8, dtype=dtype)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32) if dims == 2 else None
    return a.requires_grad_(), b.requires_grad_(), ends


@pytest.mark.parametrize("dims", [2, 3])
def test_grouped_rows_are_torchs_products(dims):
    a, b, ends = operands(torch.float32, dims)
    found, wanted = (f(a, b, offs=ends) for f in (grouped_product, F.grouped_mm))
    torch.testing.assert_close(found, wanted)
    grad = torch.randn_like(wanted)
    for x, y in zip(
        torch.autograd.grad(found, (a, b), grad),
        torch.autograd.grad(wanted, (a, b), grad),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dims", [2, 3])
def test_grouped_rows_in_float64(dims):
    a, b, ends = operands(torch.float64, dims)
    with Widened():
        found = F.grouped_mm(a, b, offs=ends, out_dtype=torch.float32)
    assert found.dtype == torch.float64
    assert torch.equal(found, grouped_product(a, b, offs=ends))


def test_rows_after_the_last_group_and_a_bias():
    a, b, _ = operands(torch.float64, 2)
    ends, bias = torch.tensor([2, 5, 7]), torch.randn(3, 8, dtype=torch.float64)
    found = grouped_product(a, b, ends, bias)
    assert torch.equal(found[2:5], a[2:5] @ b[1] + bias[1])
    assert not found[7:].any()


def test_groups_of_columns_are_refused():
    a, b, ends = operands(torch.float64, 2)
    with pytest.raises(NotImplementedError, match="needed groups of rows"):
        grouped_product(a, b[0], ends)
