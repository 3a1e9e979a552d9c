"""Rows written where a mask is True are numbered; each rank writes in its part."""

import torch
import torch._dynamo
import torch.nn.functional as F

from tests.golden.capture import (
    body,
    capture,
    changes,
    sharded,
    warnings,
    without_lines,
)
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend


def mask(seq=16):
    return torch.arange(2 * seq).view(2, seq) % 3 == 0


def assign(x, mask, rows):
    y = x.relu()
    y[mask] = rows
    return attend(y, 2)


def test_rows_of_another_sequence(mesh):
    more = (mask(), torch.randn(11, 8))
    captured = sharded(assign, mesh, more=more)
    assert captured["number_rows"].rewrites == 1
    assert_golden(
        without_lines(changes(captured["number_rows"])),
        """\
- setitem = setitem(y, l_mask_, l_rows_)
+ row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
    where='<top level> (LINE)')
+ write_rows_ = write_rows_(y, l_mask_, row_numbers_default, l_rows_, 0, False)""",
    )
    assert_golden(
        without_lines(captured.lines("row_numbers", "cp_place", "write_rows", "ring")),
        """\
row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
    where='<top level> (LINE)')  # [2, 16]
cp_place = cp_place(l_mask_, (S(1),))  # [2, 16] S(1)
cp_place_1 = cp_place(row_numbers_default, (S(1),))  # [2, 16] S(1)
write_rows_ = write_rows(y, cp_place, cp_place_1, cp_replicate, 0,
    False)  # [2, 16, 8] S(1)
unflatten = .unflatten(write_rows_, -1, (2, -1))  # [2, 16, 2, 4] S(1)
ring_attention_default = cp.ring_attention(q, q, q, sizes=[16, 16],
    spec='causal scale=0.5', group=GROUP)
getitem = ring_attention_default[0]  # [2, 2, 16, 4] S(2)""",
    )


def test_a_mask_of_entries_is_numbered_by_token(mesh):
    """So that no integer for each entry of the sequence is on every rank."""

    def scatter(x, mask, rows):
        return x.relu().masked_scatter(mask, rows)

    entries = torch.rand(2, 16, 8) < 0.5
    captured = sharded(scatter, mesh, more=(entries, torch.randn(300)))
    assert_golden(
        without_lines(captured.lines("row_numbers", "cp_place", "write_rows")),
        """\
row_numbers_default = cp.row_numbers(l_mask_, rows=300, exact=False, by_token=True,
    where='<top level> (LINE)')  # [2, 16]
cp_place = cp_place(l_mask_, (S(1),))  # [2, 16, 8] S(1)
cp_place_1 = cp_place(row_numbers_default, (S(1),))  # [2, 16] S(1)
write_rows = write_rows(relu, cp_place, cp_place_1, cp_replicate, 0,
    False)  # [2, 16, 8] S(1)
cp_gather = cp_gather(write_rows)  # [2, 16, 8]""",
    )


def test_an_expanded_mask_is_numbered_by_row(mesh):
    def scatter(x, mask, rows):
        y = x.relu()
        return y.masked_scatter(mask[..., None].expand_as(y), rows)

    captured = sharded(scatter, mesh, more=(mask(), torch.randn(12, 8)))
    assert_golden(
        without_lines(
            captured.lines("expand", "row_numbers", "cp_place", "write_rows")
        ),
        """\
expand_as = expand(getitem, (2, 16, 8))  # [2, 16, 8]
getitem_1 = expand_as[..., 0]  # [2, 16]
row_numbers_default = cp.row_numbers(getitem_1, rows=12, exact=False, by_token=False,
    where='<top level> (LINE)')  # [2, 16]
cp_place = cp_place(getitem_1, (S(1),))  # [2, 16] S(1)
cp_place_1 = cp_place(row_numbers_default, (S(1),))  # [2, 16] S(1)
write_rows = write_rows(y, cp_place, cp_place_1, cp_replicate, 0,
    False)  # [2, 16, 8] S(1)
cp_gather = cp_gather(write_rows)  # [2, 16, 8]""",
    )


def test_added_rows_are_not_read(mesh):
    def add(x, mask, rows):
        y = x.relu()
        new = y[mask, :] + rows
        y[mask, :] = new
        return y * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured = sharded(add, mesh, more=(mask(), torch.randn(11, 8)))
    assert_golden(
        without_lines(changes(captured["number_rows"])),
        """\
+ row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
    where='<top level> (LINE)')
+ write_rows_ = write_rows_(y, l_mask_, row_numbers_default, l_rows_, 0, True)
- getitem = y[l_mask_, :]
- sym_size_int = aten.sym_size.int(getitem, dim=0)
- ge = ge(sym_size_int, 11)
- _assert_scalar_default = aten._assert_scalar(self=ge, assert_msg="Runtime assertion
    failed for expression u0 >= 11 on node 'ge'")
- le = le(sym_size_int, 11)
- _assert_scalar_default_1 = aten._assert_scalar(self=le, assert_msg="Runtime assertion
    failed for expression u0 <= 11 on node 'le'")
- eq = eq(sym_size_int, 11)
- _assert_scalar_default_2 = aten._assert_scalar(self=eq, assert_msg="Runtime assertion
    failed for expression Eq(u0, 11) on node 'eq'")
- new = add(getitem, l_rows_)
- setitem = setitem(y, (l_mask_, :), new)""",
    )


def test_rows_that_are_counted_are_counted_in_the_mask(mesh):
    def count(x, mask):
        y = attend(x, 2)
        torch._check(y[mask].shape[0] <= 20)
        return y.sin().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured = sharded(count, mesh, more=(mask(),))
    assert_golden(
        captured.lines("mask", "= sym_size", "sin"),
        """\
l_mask_ = input  # [2, 16]
getitem = l_mask_[l_mask_]  # [u0]
sin = .sin(y)  # [2, 16, 8] S(1)
sum_1 = .sum(sin)  # [] P(sum)""",
    )
    assert "replicated" not in captured.text


def test_rows_that_are_read_are_read_on_every_rank(mesh, caplog):
    def read(x, mask):
        return x.relu()[mask].sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured = sharded(read, mesh, more=(mask(),))
    assert_golden(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
relu = .relu(cp_shard)
cp_gather = cp_gather(relu)
getitem = cp_gather[l_mask_]
sym_size_int = aten.sym_size.int(getitem, dim=0)
ge = ge(sym_size_int, 0)
_assert_scalar_default = aten._assert_scalar(self=ge, assert_msg="Runtime assertion
    failed for expression u0 >= 0 on node 'ge'")
le = le(sym_size_int, 32)
_assert_scalar_default_1 = aten._assert_scalar(self=le, assert_msg="Runtime assertion
    failed for expression u0 <= 32 on node 'le'")
sum_1 = .sum(getitem)
return (sum_1,)""",
    )
    (text,) = warnings(caplog)
    assert "its data tells the size of its result" in text


def test_attention_of_chosen_rows_is_whole_on_every_rank(mesh, caplog):
    """As of images that are chosen by a mask; the number of rows has no value."""

    def chosen(x, rows):
        some = x.relu()[rows].unsqueeze(1)
        y = F.scaled_dot_product_attention(some, some, some)
        return x + y.transpose(1, 2).sum()

    rows = torch.tensor([True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        captured = sharded(chosen, mesh, more=(rows,))
    assert_golden(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
relu = .relu(cp_shard)
cp_gather = cp_gather(relu)
getitem = cp_gather[l_rows_]
sym_size_int = aten.sym_size.int(getitem, dim=0)
ge = ge(sym_size_int, 0)
_assert_scalar_default = aten._assert_scalar(self=ge, assert_msg="Runtime assertion
    failed for expression u0 >= 0 on node 'ge'")
le = le(sym_size_int, 2)
_assert_scalar_default_1 = aten._assert_scalar(self=le, assert_msg="Runtime assertion
    failed for expression u0 <= 2 on node 'le'")
some = .unsqueeze(getitem, 1)
y = scaled_dot_product_attention(some, some, some)
transpose = .transpose(y, 1, 2)
sum_1 = .sum(transpose)
cp_replicate = cp_replicate(sum_1)
add = add(cp_shard, cp_replicate)
cp_gather_1 = cp_gather(add)
return (cp_gather_1,)""",
    )
    (text,) = warnings(caplog)
    assert "its data tells the size of its result" in text


def test_numbers_are_written_without_rows(mesh):
    def zero(x, mask):
        y = x.relu()
        y[mask] = 0.0
        return y * 2

    captured = sharded(zero, mesh, more=(mask(),))
    assert captured["number_rows"].rewrites == 0
    assert_golden(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
y = .relu(cp_shard)
cp_place = cp_place(l_mask_, (S(1),))
setitem = write_rows(y, cp_place, None, 0, 0, False)
mul = mul(setitem, 2)
cp_gather = cp_gather(mul)
return (cp_gather,)""",
    )


def test_other_indices_stay(mesh):
    """Slices, positions, and a mask beside positions."""

    def write(x, mask, rows):
        y = x.relu()
        y[:, :4] = rows[:4]
        y[0, torch.arange(4)] = rows[:4]
        y[torch.arange(2), mask[0, :8].nonzero_static(size=2)[:, 0]] = rows[:2]
        return y * 2

    captured = capture(
        write,
        torch.randn(2, 16, 8),
        mask(),
        torch.randn(11, 8),
        mesh=mesh,
        until="number_rows",
    )
    assert captured["number_rows"].rewrites == 0
    assert not captured["number_rows"].changed
