"""New tensors that are written part by part become the join of the parts."""

import pytest
import torch

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend


def joined(write, mesh, until="join_parts"):
    def forward(x):
        y = attend(x)
        return attend(write(y, y.sin()))

    x = torch.zeros(2, 40, 8)
    return capture(forward, x, mesh=mesh, shard={"x": 1}, until=until)[until]


def by_methods(x, y):
    new = x.new_empty(x.shape)
    new[..., 3:].copy_(y[..., 3:])
    new[..., :3].copy_(x[..., :3])
    return new


def by_items(x, y):
    new = torch.empty_like(x)
    new[..., :3] = x[..., :3]
    new[..., 3:] = y[..., 3:]
    return new


def interleaved(x, y):
    new = torch.zeros_like(x)
    new[..., 1::2] = y[..., :4]
    new[..., ::2] = x[..., :4]
    return new


def of_tokens(x, y):
    new = torch.empty_like(x)
    new[:, :7] = x[:, :7]
    new[:, 7:] = y[:, 7:]
    return new


def of_a_later_one(x, y):
    """A part is a new tensor that is made after the one that it is written to."""
    new = torch.empty_like(x)
    part = torch.empty_like(x[..., :3])
    part[..., :1] = x[..., :1]
    part[..., 1:] = y[..., 1:3]
    new[..., :3] = part
    new[..., 3:] = y[..., 3:]
    return new


def of_another_dtype(x, y):
    new = x.new_empty(x.shape)
    new[..., :3] = x[..., :3].double()
    new[..., 3:] = y[..., 3:]
    return new


def test_parts_by_methods(mesh):
    step = joined(by_methods, mesh)
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
- new = .new_empty(y, (2, 40, 8))
- getitem = new[..., 3:]
- clone = clone(getitem)
- copy_ = .copy_(clone, getitem_1)
- cp_write = cp_write(new, clone, getitem)
- getitem_2 = cp_write[..., :3]
+ cat = cat([getitem_3, getitem_1], 2)
- clone_1 = clone(getitem_2)
- copy__1 = .copy_(clone_1, getitem_3)
- cp_write_1 = cp_write(cp_write, clone_1, getitem)
- unflatten_1 = .unflatten(cp_write_1, -1, (4, -1))
+ unflatten_1 = .unflatten(cat, -1, (4, -1))""",
    )


def test_a_part_that_is_made_of_parts(mesh):
    assert joined(of_a_later_one, mesh).rewrites == 2


def test_parts_by_turns(mesh):
    step = joined(interleaved, mesh)
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
- new = zeros_like(y)
- setitem = setitem(new, (..., 1::2), getitem)
- setitem_1 = setitem(new, (..., ::2), getitem_1)
+ stack = stack([getitem_1, getitem], 3)
+ flatten_2 = flatten(stack, 2, 3)
- unflatten_1 = .unflatten(new, -1, (4, -1))
+ unflatten_1 = .unflatten(flatten_2, -1, (4, -1))""",
    )


@pytest.mark.parametrize("write", [by_items, of_tokens, of_another_dtype])
def test_every_form(write, mesh):
    step = joined(write, mesh)
    assert step.rewrites == 1
    assert "cat" in step.after and "setitem" not in step.after


def a_part_is_left(x, y):
    new = torch.zeros_like(x)
    new[..., :3] = x[..., :3]
    new[..., 4:] = y[..., 4:]
    return new


def a_part_twice(x, y):
    new = torch.empty_like(x)
    new[..., :4] = x[..., :4]
    new[..., 3:] = y[..., 3:]
    return new


def read_in_between(x, y):
    new = torch.zeros_like(x)
    new[..., :3] = x[..., :3]
    half = new * 2
    new[..., 3:] = y[..., 3:]
    return new + half


def two_dimensions(x, y):
    new = torch.zeros_like(x)
    new[..., :3] = x[..., :3]
    new[:, :7] = y[:, :7]
    return new


def broadcast(x, y):
    new = torch.empty_like(x)
    new[..., :3] = x[..., :1]
    new[..., 3:] = y[..., 3:]
    return new


def a_number(x, y):
    new = torch.empty_like(x)
    new[..., :3] = 1.0
    new[..., 3:] = y[..., 3:]
    return new


def a_view_that_is_kept(x, y):
    new = torch.zeros_like(x)
    first = new[..., :2]
    new[..., :3] = x[..., :3]
    new[..., 3:] = y[..., 3:]
    return new + first.sum()


def under_no_grad(x, y):
    new = torch.empty_like(x)
    with torch.no_grad():
        new[..., :3] = x[..., :3]
        new[..., 3:] = y[..., 3:]
    return new + x


def by_positions(x, y):
    new = torch.empty_like(x)
    new[..., torch.arange(3)] = x[..., :3]
    new[..., 3:] = y[..., 3:]
    return new


TWINS = [
    a_part_is_left, a_part_twice, read_in_between, two_dimensions, broadcast, a_number,
    a_view_that_is_kept, under_no_grad, by_positions,
]  # fmt: skip


@pytest.mark.parametrize("write", TWINS)
def test_a_twin_stays(write, mesh):
    assert joined(write, mesh).rewrites == 0
