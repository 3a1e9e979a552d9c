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


class _Index:
    def __getitem__(self, index):
        return index


at = _Index()
FIRST, REST = at[..., :3], at[..., 3:]
EARLY, LATE = at[:, :7], at[:, 7:]


def of(*writes, make=torch.empty_like):
    """A new tensor, and what is written to parts of it: of x, of y, or a number."""

    def write(x, y):
        new = make(x)
        for index, part in writes:
            new[index] = part(x, y) if callable(part) else part
        return new

    return write


def x_of(index):
    return lambda x, y: x[index]


def y_of(index):
    return lambda x, y: y[index]


ODD, EVEN, HALF = at[..., 1::2], at[..., ::2], at[..., :4]
interleaved = of((ODD, y_of(HALF)), (EVEN, x_of(HALF)), make=torch.zeros_like)
FORMS = {
    "items": of((FIRST, x_of(FIRST)), (REST, y_of(REST))),
    "tokens": of((EARLY, x_of(EARLY)), (LATE, y_of(LATE))),
    "another dtype": of((FIRST, lambda x, y: x[FIRST].double()), (REST, y_of(REST))),
}


def of_a_later_one(x, y):
    """A part is a new tensor that is made after the one that it is written to."""
    new = torch.empty_like(x)
    part = torch.empty_like(x[..., :3])
    part[..., :1] = x[..., :1]
    part[..., 1:] = y[..., 1:3]
    new[..., :3] = part
    new[..., 3:] = y[..., 3:]
    return new


def test_a_part_that_is_made_of_parts(mesh):
    assert joined(of_a_later_one, mesh).rewrites == 2


def test_parts_by_turns(mesh):
    step = joined(interleaved, mesh)
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
+ stack = stack([getitem_1, getitem], 3)
+ flatten_2 = flatten(stack, 2, 3)
~ unflatten_1: new -> flatten_2
- zeros_like, setitem, setitem""",
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form, mesh):
    step = joined(FORMS[form], mesh)
    assert step.rewrites == 1
    assert "cat" in step.after and "setitem" not in step.after


def read_in_between(x, y):
    new = torch.zeros_like(x)
    new[..., :3] = x[..., :3]
    half = new * 2
    new[..., 3:] = y[..., 3:]
    return new + half


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


AFTER, TWO = at[..., 4:], (REST, y_of(REST))
TWINS = {
    "a part is left": of(
        (FIRST, x_of(FIRST)), (AFTER, y_of(AFTER)), make=torch.zeros_like
    ),
    "a part twice": of((HALF, x_of(HALF)), TWO),
    "two dimensions": of(
        (FIRST, x_of(FIRST)), (EARLY, y_of(EARLY)), make=torch.zeros_like
    ),
    "broadcast": of((FIRST, x_of(at[..., :1])), TWO),
    "a number": of((FIRST, 1.0), TWO),
    "positions": of((at[..., torch.arange(3)], x_of(FIRST)), TWO),
    "read in between": read_in_between,
    "a view that is kept": a_view_that_is_kept,
    "under no_grad": under_no_grad,
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_stays(twin, mesh):
    assert joined(TWINS[twin], mesh).rewrites == 0
