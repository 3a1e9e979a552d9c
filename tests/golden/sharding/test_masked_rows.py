"""Rows written where a mask is True are numbered; each rank writes in its part."""

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import (
    capture_pass,
    changes,
    localised,
    warnings,
    without_lines,
)
from tests.golden.golden_text import assert_golden, lines_with, table
from tests.golden.operands import attend

SHARD = {"x": 1}
with_counts = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)


def mask(seq=16):
    return torch.arange(2 * seq).view(2, seq) % 3 == 0


def assign(x, mask, rows):
    """Rows of another sequence."""
    y = x.relu()
    y[mask] = rows
    return attend(y, 2)


def scatter(x, mask, rows):
    return x.relu().masked_scatter(mask, rows)


def scatter_rows(x, mask, rows):
    y = x.relu()
    return y.masked_scatter(mask[..., None].expand_as(y), rows)


def add(x, mask, rows):
    """Rows that are added are not read."""
    y = x.relu()
    new = y[mask, :] + rows
    y[mask, :] = new
    return y * 2


def zero(x, mask):
    """Numbers are written without rows."""
    y = x.relu()
    y[mask] = 0.0
    return y * 2


ENTRIES = torch.arange(2 * 16 * 8).view(2, 16, 8) % 5 == 0
WRITES = {
    assign: (mask(), torch.ones(11, 8)),
    scatter: (ENTRIES, torch.ones(300)),
    scatter_rows: (mask(), torch.ones(12, 8)),
    add: (mask(), torch.ones(11, 8)),
    zero: (mask(),),
}


def numbered(mesh, fn, *more):
    x = torch.randn(2, 16, 8)
    with with_counts:
        return capture_pass("number_rows", fn, x, *more, mesh=mesh, shard=SHARD)


def test_rows_are_numbered(mesh):
    """By token for masks of entries, and by row where all entries of one are equal.

    So that no integer for each entry of the sequence is on every rank.
    """
    texts = {}
    for fn in (assign, add, scatter, scatter_rows):
        step = numbered(mesh, fn, *WRITES[fn])
        assert step.rewrites == 1
        texts[fn.__name__] = lines_with(changes(step), "row_numbers(", "write_rows")
    assert_golden(
        without_lines(table(texts)),
        """\
assign:
  + row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
      where='<top level> (LINE)')
  + write_rows_ = write_rows_(y, l_mask_, row_numbers_default, l_rows_, 0, False)
add:
  + row_numbers_default = cp.row_numbers(l_mask_, rows=11, exact=True, by_token=False,
      where='<top level> (LINE)')
  + write_rows_ = write_rows_(y, l_mask_, row_numbers_default, l_rows_, 0, True)
scatter:
  + row_numbers_default = cp.row_numbers(l_mask_, rows=300, exact=False, by_token=True,
      where='<top level> (LINE)')
  + write_rows = write_rows(relu, l_mask_, row_numbers_default, reshape, 0, False)
  ~ return: masked_scatter -> write_rows
scatter_rows:
  + row_numbers_default = cp.row_numbers(getitem_1, rows=12, exact=False,
      by_token=False, where='<top level> (LINE)')
  + write_rows = write_rows(y, getitem_1, row_numbers_default, reshape, 0, False)
  ~ return: masked_scatter -> write_rows""",
    )


@pytest.mark.parametrize("fn", WRITES)
def test_each_rank_writes_in_its_part(mesh, fn):
    """No rank gathers what it writes to, nor rows that are learned."""
    weight, x = nn.Parameter(torch.ones(1)), torch.randn(2, 16, 8)
    given = {"mesh": mesh, "shard": SHARD, "strategy": "ring", "layout": "contiguous"}

    def loss(x, mask, *rows):
        return fn(x, mask, *(weight * y for y in rows)).cos().sum()

    with with_counts:
        found = localised(loss, x, *WRITES[fn], **given)
    assert "all_gather" not in found.text


def write_elsewhere(x, mask, rows):
    """Slices, positions, and a mask beside positions."""
    y = x.relu()
    y[:, :4] = rows[:4]
    y[0, torch.arange(4)] = rows[:4]
    y[torch.arange(2), mask[0, :8].nonzero_static(size=2)[:, 0]] = rows[:2]
    return y * 2


def test_other_indices_stay(mesh):
    for fn, more in ((zero, (mask(),)), (write_elsewhere, WRITES[assign])):
        step = numbered(mesh, fn, *more)
        assert step.rewrites == 0 and not step.changed


def count(x, mask):
    y = attend(x, 2)
    torch._check(y[mask].shape[0] <= 20)
    return y.sin().sum()


def test_rows_that_are_counted_are_counted_in_the_mask(mesh, caplog):
    given = {"mesh": mesh, "shard": SHARD, "strategy": "ring"}
    with with_counts:
        text = localised(count, torch.randn(2, 16, 8), mask(), **given).text
    assert "all_gather" not in text
    assert not warnings(caplog)


def read(x, mask):
    return x.relu()[mask].sum()


def attend_to_some(x, mask):
    """As of images that are chosen by a mask; the number of rows has no value."""
    some = x.relu()[mask[:, 0]].unsqueeze(1)
    y = F.scaled_dot_product_attention(some, some, some)
    return (x + y.transpose(1, 2).sum()).sum()


@pytest.mark.parametrize("fn", [read, attend_to_some])
def test_rows_that_are_read_are_read_on_every_rank(mesh, caplog, fn):
    with with_counts:
        text = localised(fn, torch.randn(2, 16, 8), mask(), mesh=mesh, shard=SHARD).text
    assert text.count("all_gather_into_tensor(") == 1
    assert "its data tells the size of its result" in warnings(caplog)[-1]
