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
    assert row_numbers(mask(0, 1), 5, False, False, "line 1")[1] == 0  # rows are left
    for shape in ((0,), (2, 0), (3,)):  # no True entry
        none = torch.zeros(shape, dtype=torch.bool)
        numbers = row_numbers(none, 0, True, False, "line 1")
        assert numbers.shape == shape and not numbers.any()
    marks = mask([[1, 0], [0, 0], [1, 1]], [[0, 1], [1, 0], [0, 0]])
    numbers = row_numbers(marks, 5, True, True, "line 1")
    assert numbers.tolist() == [[0, 1, 1], [3, 4, 5]]


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


@pytest.mark.parametrize("by_token", [False, True])
def test_the_operator_is_registered_as_torch_wants_it(by_token):
    marks = mask([0, 1, 0], [1, 0, 1])
    torch.library.opcheck(row_numbers, (marks, 3, True, by_token, "line 1"))
