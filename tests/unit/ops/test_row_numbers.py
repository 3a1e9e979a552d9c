"""Which row of a value goes to which True entry of a mask."""

import pytest
import torch

import cpcompile.ops  # noqa: F401  (registers the operator)

row_numbers = torch.ops.cp.row_numbers.default


def mask(*entries):
    return torch.tensor(entries, dtype=torch.bool)


def test_true_entries_get_rows_in_order():
    marks = mask([0, 1, 0], [1, 0, 1])
    numbers = row_numbers(marks, 3, True, False, "line 1")
    assert numbers[marks].tolist() == [0, 1, 2]
    assert numbers[~marks].tolist() == [0, 2, 1]  # in turn


def test_entries_of_tokens_begin_after_those_of_the_tokens_before():
    marks = mask([[1, 0], [0, 0], [1, 1]], [[0, 1], [1, 0], [0, 0]])
    numbers = row_numbers(marks, 5, True, True, "line 1")
    assert numbers.tolist() == [[0, 1, 1], [3, 4, 5]]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,)])
def test_a_mask_without_true_entries(shape):
    numbers = row_numbers(
        torch.zeros(shape, dtype=torch.bool), 0, True, False, "line 1"
    )
    assert numbers.shape == shape
    assert not numbers.any()


@pytest.mark.parametrize(
    ("rows", "exact", "needed"),
    [
        (2, True, "one row for each"),
        (4, True, "one row for each"),
        (2, False, "at least one row for each"),
    ],
)
def test_another_number_of_rows_is_an_error(rows, exact, needed):
    with pytest.raises(RuntimeError) as error:
        row_numbers(mask(1, 0, 1, 1), rows, exact, False, "model (line 7)")
    assert str(error.value) == (
        "model (line 7): shape mismatch: a mask is True at 3 entries, and "
        f"{rows} rows are given; needed {needed}"
    )


def test_more_rows_than_true_entries_are_allowed_where_rows_may_be_left():
    assert row_numbers(mask(0, 1), 5, False, False, "line 1")[1] == 0


@pytest.mark.parametrize("by_token", [False, True])
def test_the_operator_is_registered_as_torch_wants_it(by_token):
    marks = mask([0, 1, 0], [1, 0, 1])
    torch.library.opcheck(row_numbers, (marks, 3, True, by_token, "line 1"))
