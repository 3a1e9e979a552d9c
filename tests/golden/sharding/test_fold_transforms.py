"""What runs inside of torch.func transforms becomes one call."""

import pytest
import torch
import torch.nn.functional as F
from torch import func

from cpcompile.passes.graph.transforms import transforms
from tests.golden.capture import capture, changes, sharded
from tests.golden.golden_text import assert_golden

sdpa = F.scaled_dot_product_attention


def test_vmap(mesh):
    def step(x):
        return sdpa(x, x, x) + func.vmap(lambda row: row * 2)(x)

    folded = sharded(step, mesh)["fold_transforms"]
    assert folded.rewrites == 1
    assert_golden(
        changes(folded),
        """\
+ cp_transform = cp_transform(l_x_)
~ add: _remove_batch_dim -> cp_transform[0]
- _vmap_increment_nesting, _add_batch_dim, mul, _remove_batch_dim,
    _vmap_decrement_nesting""",
    )


def test_wrapped_tensors_that_are_used_later(mesh):
    def step(x):
        result, pull = func.vjp(torch.sin, x)
        return sdpa(x, x, x) + result + pull(x.cos())[0]

    captured = sharded(step, mesh)
    assert captured["fold_transforms"].rewrites == 1
    assert not list(transforms(captured.gm.graph))
    assert_golden(
        captured.lines("cp_transform", "add"),
        """\
cp_transform = cp_transform(cp_shard, squeeze, cos)
getitem_3 = cp_transform[0]  # [2, 16, 8] S(1)
getitem_2 = cp_transform[1]
add_1 = add(getitem_3, getitem)  # [2, 16, 8] S(1)
cp_gather = cp_gather(add_1)  # [2, 16, 8]""",
    )


def test_what_makes_masks_stays(mesh):
    def step(x, ids):
        row = func.vmap(lambda i: i + 1)(ids)
        return sdpa(x, x, x) * row[:, None]

    captured = sharded(step, mesh, more=(torch.arange(16),))
    assert not captured["fold_transforms"].changed


@pytest.mark.parametrize("strict", [True, False])
def test_attention_inside(mesh, strict):
    def step(x):
        return sdpa(x, x, x) + func.vmap(lambda row: sdpa(row, row, row))(x)

    x = torch.randn(2, 16, 8)
    captured = capture(step, x, mesh=mesh, shard={"x": 1}, strict=strict)
    if strict:
        assert "inside of a transform of torch.func" in str(captured.error)
        assert "test_fold_transforms.py" in str(captured.error)
    else:
        assert "cp_replicated(cp_transform, " in captured.text
