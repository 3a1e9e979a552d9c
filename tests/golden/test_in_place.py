"""In-place calls become functional ones, or are refused where others see the memory."""
# ruff: noqa: E501  graphs as text have long lines

import operator

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline

from cpcompile.errors import CannotRewrite
from tests.golden.capture import body, capture, sharded, warnings, without_lines


def test_add_in_place(mesh):
    captured = sharded(lambda x: x.relu().add_(1) * 2, mesh)
    assert captured["shard_graph"].rewrites == 3
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
relu = .relu(cp_shard)
add_ = cp_functional_add_(relu, 1)
mul = mul(add_, 2)
cp_gather = cp_gather(mul)
return (cp_gather,)""",
    )


def test_operator_in_place(mesh):
    captured = sharded(lambda x: operator.imul(x.relu(), 2), mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
relu = .relu(cp_shard)
imul = cp_functional_imul(relu, 2)
cp_gather = cp_gather(imul)
return (cp_gather,)""",
    )


def test_assignment_to_a_part(mesh, caplog):
    """DTensor would lose it; later readers must see what was written."""

    def assign(x):
        y = x.relu()
        y[:, 0] = 0
        return y * 2

    captured = sharded(assign, mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
y = .relu(cp_shard)
cp_replicated_cp_functional_setitem = cp_replicated_cp_functional_setitem(y, (slice(None, None, None), 0), 0)
cp_shard_1 = cp_shard(cp_replicated_cp_functional_setitem, 1)
mul = mul(cp_shard_1, 2)
cp_gather = cp_gather(mul)
return (cp_gather,)""",
    )
    (text,) = warnings(caplog)
    assert_expected_inline(
        without_lines(text),
        """cp_functional_setitem at <top level> (LINE) runs on gathered tensors, because DTensor cannot shard it here (DTensor has no rule for assignment to a part of a tensor); the result is correct, only slower""",
    )


def test_a_write_to_an_argument_is_refused(mesh):
    """The caller would not see it in the full tensor."""

    def write(x):
        return x.add_(1) * 2

    x = torch.randn(2, 16, 8)
    captured = capture(write, x, mesh=mesh, shard={"x": 1})
    assert type(captured.error) is CannotRewrite


def test_inplace_activation(mesh):
    captured = sharded(lambda x: F.relu(x * 2, inplace=True) + 1, mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
mul = mul(cp_shard, 2)
relu = cp_functional_relu(mul, inplace=True)
add = add(relu, 1)
cp_gather = cp_gather(add)
return (cp_gather,)""",
    )


def test_a_write_that_another_tensor_sees_is_refused(mesh):
    def aliased(x):
        y = x.relu()
        first = y[:, :4]
        first.add_(1)
        return y * 2

    x = torch.randn(2, 16, 8)
    captured = capture(aliased, x, mesh=mesh, shard={"x": 1})
    assert type(captured.error) is CannotRewrite
    assert_expected_inline(
        without_lines(str(captured.error)),
        """add_ at <top level> (LINE) writes into first, which shares its memory with y, and that is read later; needed a write that only one tensor sees: assign to the tensor itself (x[:, 0] = y instead of x[:, 0].copy_(y)) or clone it first""",
    )


def test_channels_are_assigned_where_the_tokens_are(mesh, caplog):
    """As some models put keys together; nothing is gathered for it."""

    def assign(x):
        y = x.relu()
        y[..., :3] = x[..., :3] * 2
        return y + 1

    captured = sharded(assign, mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
y = .relu(cp_shard)
getitem = getitem(cp_shard, (Ellipsis, slice(None, 3, None)))
mul = mul(getitem, 2)
setitem = cp_assign(y, mul, 2, 0, 3, 1)
add = add(setitem, 1)
cp_gather = cp_gather(add)
return (cp_gather,)""",
    )
    assert not warnings(caplog)


def test_a_write_through_a_view_of_channels_is_an_assignment(mesh, caplog):
    def assign(x):
        y = torch.empty_like(x)
        y[..., ::2].copy_(x[..., :4] * 2)
        y[..., 1::2].copy_(x[..., 4:])
        return y + 1

    captured = sharded(assign, mesh)
    assert_expected_inline(
        captured.lines("cp_assign", "add"),
        """\
copy_ = cp_assign(y, mul, 2, 0, 8, 2)  # [2, 16, 8] S(1)
copy__1 = cp_assign(copy_, getitem_3, 2, 1, 8, 2)  # [2, 16, 8] S(1)
add = add(copy__1, 1)  # [2, 16, 8] S(1)
cp_gather = cp_gather(add)  # [2, 16, 8]""",
    )
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "index",
    [
        (slice(None), slice(0, 4)),  # tokens, which are split
        (..., 0),
        (0, ..., slice(3)),
    ],
)
def test_other_assignments_are_gathered(mesh, index):
    """The twins of the assignment of channels."""

    def assign(x):
        y = x.relu()
        y[index] = x[index] * 2
        return y + 1

    text = sharded(assign, mesh).text
    assert "cp_assign" not in text
    assert "= cp_replicated_cp_functional_setitem(" in text


def test_a_write_through_a_view_that_is_read_later_is_refused(mesh):
    """What stands for a tensor that is sharded again is the same memory."""

    def assign(q, x):
        k = x.new_empty(2, 4, 16, 8)  # Replicate, and so sharded again for attention
        part = k[..., :3]
        part.copy_(x[..., :3])
        return F.scaled_dot_product_attention(q, k, q) + part.sum()

    q, x = torch.randn(2, 2, 4, 16, 8)
    captured = capture(assign, q, x, mesh=mesh, shard={"q": 2, "x": 2})
    assert type(captured.error) is CannotRewrite
    assert "writes into part, which shares its memory with " in str(captured.error)


def test_a_write_that_no_other_tensor_reads_later(mesh):
    """The twin of the refused one."""

    def aliased(x):
        y = x.relu()
        first = y[:, :4].sum()
        return y.add_(1) * first

    assert "= cp_functional_add_(" in sharded(aliased, mesh).text


def test_a_write_into_a_plain_tensor_is_refused(mesh):
    def fill(x):
        buffer = torch.zeros(2, 16, 8)
        buffer[:] = x.relu()
        return buffer

    x = torch.randn(2, 16, 8)
    captured = capture(fill, x, mesh=mesh, shard={"x": 1})
    assert type(captured.error) is CannotRewrite
    assert_expected_inline(
        without_lines(str(captured.error)),
        """setitem at <top level> (LINE) writes a sharded tensor into one that every rank holds in full; needed a call that returns a new tensor: write it with torch.where, torch.cat or index_put instead of in place""",
    )


def test_a_write_of_plain_into_plain_stays(mesh):
    def shift(x, labels):
        moved = labels.new_zeros(labels.shape)
        moved[:, 1:] = labels[:, :-1]
        return x.relu(), moved

    captured = sharded(shift, mesh, more=(torch.randint(8, (2, 16)),))
    assert "= setitem(moved, " in captured.text
    assert "cp_functional" not in captured.text


def test_a_result_written_to_out_is_refused(mesh):
    def doubled(x):
        y = x.relu()
        return torch.add(y, 1, out=torch.empty_like(y))

    x = torch.randn(2, 16, 8)
    captured = capture(doubled, x, mesh=mesh, shard={"x": 1})
    assert type(captured.error) is CannotRewrite
    assert "out=" in str(captured.error)
