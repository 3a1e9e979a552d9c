"""Which tokens are written at positions, and by which rows, on one process."""

import pytest
import torch
from torch.testing import assert_close

from cpcompile.passes.placement.token_positions import (
    cp_numbers_at,
    cp_summed_at,
    cp_written_at,
)

X = torch.zeros(2, 5, 3)
SHARED = torch.tensor([3, -1, 0, 4])  # the second and the last are one position
OWN = torch.tensor([[3, -1], [0, 0]])
CASES = {
    "the same for all": (1, (SHARED,)),
    "int32": (1, (SHARED.int(),)),
    "of each sequence": (0, (None, OWN)),
    "of some": (0, (torch.tensor([[1], [0]]), OWN)),
    "of one": (0, (1, SHARED)),
    "a number": (0, (torch.tensor(1), torch.tensor(2))),
}


def written(first, items):
    """What a loop over the positions writes, in their order, and their sums."""
    indices = [
        torch.arange(2)[:, None] if x is None else torch.as_tensor(x) for x in items
    ]
    indices = torch.broadcast_tensors(*indices)
    sizes = X.shape[first : first + len(items)]
    places = [x.flatten().tolist() for x in indices]
    numbers, sums = torch.full(sizes, -1), {}
    for row, place in enumerate(zip(*places, strict=True)):
        numbers[place] = row
        key = tuple(p % n for p, n in zip(place, sizes, strict=True))
        sums.setdefault(key, []).append(row)
    return numbers, sums


@pytest.mark.parametrize("name", CASES)
def test_rows(name):
    first, items = CASES[name]
    numbers, sums = written(first, items)
    mask = cp_written_at(X, first, items)
    assert_close(mask, numbers >= 0)
    found = cp_numbers_at(X, first, items)
    assert_close(found[mask], numbers[mask])
    rows = sum(map(len, sums.values()))
    value = torch.randn(*X.shape[:first], rows, 3)
    total = cp_summed_at(X, first, items, value)
    for place, of_place in sums.items():
        got = total.select(first, int(found[place]))
        assert_close(got, value.index_select(first, torch.tensor(of_place)).sum(first))


def test_a_position_that_is_not_there():
    with pytest.raises(IndexError):
        cp_written_at(X, 1, (torch.tensor([5]),))
