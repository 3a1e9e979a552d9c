"""Calls whose rules mistake what is split, or what parts are."""

import pytest
import torch
import torch.nn.functional as F

from tests.golden.capture import localised, warnings
from tests.golden.golden_text import assert_golden, lines_with, table
from tests.support.this_torch import skip_if_combined

WEIGHT = torch.nn.Parameter(torch.ones(8))


def local(fn, mesh):
    return localised(fn, torch.randn(2, 16, 8), mesh=mesh, shard={"x": 1}).text


def test_parts_that_are_no_sums_are_combined_at_once(mesh):
    """Maxima, which sums read, are combined before; only sums wait."""
    skip_if_combined(lambda x: (x > 0).any(1).float(), mesh)
    forms = {
        "norm": lambda x: -x.norm(dim=1),
        "flags": lambda x: x.sum() * (x > 0).any(1).sum(),
        "maxima": lambda x: x.amax(1).sum() + x.sum(),
    }
    word = "all_reduce("
    assert_golden(
        table({name: lines_with(local(x, mesh), word) for name, x in forms.items()}),
        """\
norm: all_reduce = _c10d_functional.all_reduce(pow_1, reduce_op='sum', group_name='0')
flags:
  all_reduce = _c10d_functional.all_reduce(any_2, reduce_op='sum', group_name='0')
  all_reduce_1 = _c10d_functional.all_reduce(mul_1, reduce_op='sum', group_name='0')
maxima:
  all_reduce = _c10d_functional.all_reduce(stack, reduce_op='max', group_name='0')
  all_reduce_1 = _c10d_functional.all_reduce(add_1, reduce_op='sum', group_name='0')""",
    )


def test_a_summand_of_a_gradient_is_combined_before_it_is_written_to(mesh):
    """The backward of a deviation fills zeros in where it is zero."""

    def scaled(x):
        x = x * WEIGHT
        return x / x.std(1, keepdim=True)

    text = local(scaled, mesh)
    assert_golden(
        lines_with(text, "masked_fill", "all_reduce_2"),
        """\
all_reduce_2 = _c10d_functional.all_reduce(div_12, reduce_op='sum', group_name='0')
wait_tensor_2 = _c10d_functional.wait_tensor(all_reduce_2)
masked_fill_1 = aten.masked_fill.Scalar(wait_tensor_2, eq_1, value=0)
mul_9 = aten.mul.Scalar(masked_fill_1, other=0.133333)""",
    )


def pooled(x):
    """The sequence is the channels."""
    x = (x * WEIGHT).unflatten(2, (2, 4)).unsqueeze(0).flatten(0, 1)
    return F.adaptive_avg_pool2d(x, (1, 2)).sum()


def pooled_without_a_batch(x):
    return F.adaptive_avg_pool2d(x * WEIGHT, (5, 7)).sum()


@pytest.mark.parametrize("fn", [pooled, pooled_without_a_batch])
def test_images_without_a_batch_are_gathered(mesh, caplog, fn):
    is_gathered = fn is pooled_without_a_batch
    assert ("all_gather" in local(fn, mesh)) == is_gathered
    texts = [x for x in warnings(caplog) if "rows of an image without a batch" in x]
    assert len(texts) == len(warnings(caplog)) == is_gathered
