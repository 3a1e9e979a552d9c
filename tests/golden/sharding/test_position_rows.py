"""Writes at positions that are data: each rank writes the rows of its own tokens."""

import torch

from tests.golden.capture import sharded
from tests.golden.golden_text import assert_golden, table
from tests.golden.operands import attend

AT = torch.tensor([3, -1, 9])
ROWS = torch.randn(2, 3, 8)


def assign(x, at, rows):
    y = x.relu()
    y[:, at] = rows
    return attend(y, 2).sum()


def add(x, at, rows):
    """Rows of one position are summed."""
    return attend(x.relu().index_add(1, at, rows), 2).sum()


def scatter(x, at, rows):
    return attend(x.relu().scatter(1, at, rows), 2).sum()


def scatter_tokens(x, at, rows):
    """Each sequence has its own positions."""
    at = torch.stack([at + 1, at + 2])
    return scatter(x, at.unsqueeze(-1).expand(-1, -1, 8), rows)


def test_writes(mesh):
    words = ("= cp_written", "= cp_numbers", "= cp_summed", "= write_rows")
    texts = {
        fn.__name__: sharded(fn, mesh, more=(AT, ROWS)).lines(*words)
        for fn in (assign, add, scatter_tokens)
    }
    assert_golden(
        table(texts),
        """\
assign:
  cp_written_at = cp_written_at(y, 1, (l_at_,))  # [16]
  cp_numbers_at = cp_numbers_at(y, 1, (l_at_,))  # [16]
  setitem = write_rows(y, cp_place, cp_place_1, cp_replicate, 1,
      False)  # [2, 16, 8] S(1)
add:
  cp_written_at = cp_written_at(relu, 1, (l_at_,))  # [16]
  cp_numbers_at = cp_numbers_at(relu, 1, (l_at_,))  # [16]
  cp_summed_at = cp_summed_at(relu, 1, (l_at_,), cp_replicate)  # [2, 3, 8] R
  index_add = write_rows(relu, cp_place, cp_place_1, cp_summed_at, 1,
      True)  # [2, 16, 8] S(1)
scatter_tokens:
  cp_written_at = cp_written_at(relu, 0, (None, getitem_1))  # [2, 16]
  cp_numbers_at = cp_numbers_at(relu, 0, (None, getitem_2))  # [2, 16]
  scatter = write_rows(relu, cp_place, cp_place_1, flatten_1, 0,
      False)  # [2, 16, 8] S(1)""",
    )


def test_positions_that_differ_by_channel_stay(mesh):
    at = torch.randint(16, (2, 3, 8))
    captured = sharded(scatter, mesh, more=(at, ROWS))
    assert "written_at" not in captured.text


def test_a_range_of_numbers_is_a_slice(mesh):
    """But not if it ends beyond the sequence, where torch raises."""

    def read(x, rows):
        y = attend(x, 2)[:, torch.arange(2, 62)]
        y[:, torch.arange(3)] = rows
        return y.sum()

    captured = sharded(read, mesh, 2, 64, 8, more=(ROWS,))
    assert_golden(
        captured.lines("= cp_move_tokens", "replicated", "= cp_gather"),
        """\
cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', 2, 62, 1)  # [2, 60, 8] S(1)
cp_move_tokens_1 = cp_move_tokens([cp_move_tokens, l_rows_], 1, 'assign', 0, 3,
    1)  # [2, 60, 8] S(1)
cp_gather = cp_gather(sum_1)  # []""",
    )
