"""Rows written where a mask is True are numbered; each rank writes in its part."""

import torch
import torch._dynamo
import torch.nn.functional as F

from tests.golden.capture import (
    body,
    capture,
    changes,
    inside,
    sharded,
    warnings,
    without_lines,
)
from tests.golden.golden_text import assert_golden, lines_without, table
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
+ row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
    where='<top level> (LINE)')
+ write_rows_ = write_rows_(y, l_mask_, row_numbers_default, l_rows_, 0, False)
- setitem""",
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


def scatter(x, mask, rows):
    return x.relu().masked_scatter(mask, rows)


def scatter_rows(x, mask, rows):
    y = x.relu()
    return y.masked_scatter(mask[..., None].expand_as(y), rows)


def test_masks_of_entries(mesh):
    """They are numbered by token, and by row where all entries of a row are equal.

    So that no integer for each entry of the sequence is on every rank.
    """
    entries = torch.rand(2, 16, 8) < 0.5
    captures = {
        "by token": sharded(scatter, mesh, more=(entries, torch.randn(300))),
        "by row": sharded(scatter_rows, mesh, more=(mask(), torch.randn(12, 8))),
    }
    words = ("expand", "row_numbers", "= cp_place", "= write_rows")
    texts = {name: without_lines(x.lines(*words)) for name, x in captures.items()}
    assert_golden(
        table(texts),
        """\
by token:
  row_numbers_default = cp.row_numbers(l_mask_, rows=300, exact=False, by_token=True,
      where='<top level> (LINE)')  # [2, 16]
  cp_place = cp_place(l_mask_, (S(1),))  # [2, 16, 8] S(1)
  cp_place_1 = cp_place(row_numbers_default, (S(1),))  # [2, 16] S(1)
  write_rows = write_rows(relu, cp_place, cp_place_1, cp_replicate, 0,
      False)  # [2, 16, 8] S(1)
by row:
  expand_as = expand(getitem, (2, 16, 8))  # [2, 16, 8]
  getitem_1 = expand_as[..., 0]  # [2, 16]
  row_numbers_default = cp.row_numbers(getitem_1, rows=12, exact=False, by_token=False,
      where='<top level> (LINE)')  # [2, 16]
  cp_place = cp_place(getitem_1, (S(1),))  # [2, 16] S(1)
  cp_place_1 = cp_place(row_numbers_default, (S(1),))  # [2, 16] S(1)
  write_rows = write_rows(y, cp_place, cp_place_1, cp_replicate, 0,
      False)  # [2, 16, 8] S(1)""",
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
- getitem, aten.sym_size.int, ge, aten._assert_scalar, le, aten._assert_scalar, eq,
    aten._assert_scalar, add, setitem""",
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


def read(x, mask):
    return x.relu()[mask].sum()


def attend_to_some(x, mask):
    """As of images that are chosen by a mask; the number of rows has no value."""
    some = x.relu()[mask[:, 0]].unsqueeze(1)
    y = F.scaled_dot_product_attention(some, some, some)
    return x + y.transpose(1, 2).sum()


def test_rows_that_are_read_are_read_on_every_rank(mesh, caplog):
    texts = {}
    for fn in (read, attend_to_some):
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            captured = sharded(fn, mesh, more=(mask(),))
        words = ("sym_size", "= ge(", "= le(", "_assert_scalar")
        texts[fn.__name__] = lines_without(body(captured), *words)
        text = warnings(caplog)[-1]
        assert "its data tells the size of its result" in text
    assert_golden(
        table(texts),
        """\
read:
  cp_shard = cp_shard(l_x_, 1)
  relu = .relu(cp_shard)
  cp_gather = cp_gather(relu)
  getitem = cp_gather[l_mask_]
  sum_1 = .sum(getitem)
  return (sum_1,)
attend_to_some:
  cp_shard = cp_shard(l_x_, 1)
  relu = .relu(cp_shard)
  getitem = l_mask_[:, 0]
  cp_gather = cp_gather(relu)
  getitem_1 = cp_gather[getitem]
  some = .unsqueeze(getitem_1, 1)
  y = scaled_dot_product_attention(some, some, some)
  transpose = .transpose(y, 1, 2)
  sum_1 = .sum(transpose)
  cp_replicate = cp_replicate(sum_1)
  add = add(cp_shard, cp_replicate)
  cp_gather_1 = cp_gather(add)
  return (cp_gather_1,)""",
    )


def test_numbers_are_written_without_rows(mesh):
    def zero(x, mask):
        y = x.relu()
        y[mask] = 0.0
        return y * 2

    captured = sharded(zero, mesh, more=(mask(),))
    assert captured["number_rows"].rewrites == 0
    assert_golden(
        inside(captured),
        """\
y = .relu(cp_shard)
cp_place = cp_place(l_mask_, (S(1),))
setitem = write_rows(y, cp_place, None, 0, 0, False)
mul = mul(setitem, 2)""",
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
