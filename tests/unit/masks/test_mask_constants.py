"""Masks of so many steps that only their values can be read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cpcompile.passes.model.masks.analysis.constant_masks import formula_of, numbers_in
from tests.unit.masks.mask_cases import attend, check, operands, read

S = 40  # rows, of which each is some steps


def row_by_row(q, k):
    tokens = q.shape[-2]
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tokens):
        mask[i, : i + 1] = True
    return mask


def numbers_row_by_row(q, k):
    mask = torch.full((S, S), -torch.inf)
    for i in range(S):
        mask[i, max(0, i - 6) : i + 1] = 0.0
    return mask


def sinks_row_by_row(q, k):
    """Two ranges of keys per row: the first tokens, and those before it."""
    mask = torch.zeros(S, S, dtype=torch.bool)
    for i in range(S):
        mask[i, max(0, i - 6) : i + 1] = True
        mask[i, :2] = True
    return mask


def all_but_some(q, k):
    """One range of keys that a row does not see."""
    mask = torch.ones(S, S, dtype=torch.bool)
    for i in range(S):
        mask[i, i // 2 : i // 2 + 3] = False
    return mask


def of_three_numbers(q, k):
    mask = torch.zeros(S, S)
    for i in range(S):
        mask[i, i + 1 :] = -torch.inf
        mask[i, : i // 2] = -1.5
    return mask


def of_many_numbers(q, k):
    mask = torch.zeros(S, S)
    for i in range(S):
        mask[i] = torch.arange(S) * -0.5 * i
    return mask


def of_each_head(q, k):
    mask = torch.zeros(2, S, S, dtype=torch.bool)
    for i in range(S):
        mask[0, i, : i + 1] = True
        mask[1, i, i:] = True
    return mask


def of_each_batch(q, k):
    mask = torch.zeros(2, 1, S, S, dtype=torch.bool)
    for i in range(S):
        mask[0, 0, i, : i + 1] = True
        mask[1, 0, i, i:] = True
    return mask


CASES = [
    (row_by_row, "is_causal"),
    (numbers_row_by_row, "causal, window 7"),
    (sinks_row_by_row, "dense bool [40, 40]"),
    (all_but_some, "dense bool [40, 40]"),
    (of_three_numbers, "dense float32 [40, 40]"),
    (of_many_numbers, "dense float32 [40, 40]"),
    (of_each_head, "dense bool [2, 40, 40]"),
    (of_each_batch, "key ranges per batch row"),
]


@pytest.mark.parametrize(("builder", "text"), CASES, ids=[x.__name__ for x, _ in CASES])
def test_a_mask_that_is_written_in_a_loop(builder, text):
    found = read(attend(builder), *operands(S))
    assert found.text == text
    check(found, *operands(S))


def test_more_steps_than_python_recurses():
    assert read(attend(row_by_row), *operands(150)).text == "is_causal"


OF_ALL_PAIRS = {
    "cumsum": (lambda x: x.tril().cumsum(-1) > 3, "key ranges"),
    "roll": (lambda x: x.tril().roll(1, -1), "key ranges"),
    "sort": (lambda x: x.tril().sort(-1, descending=True).values, "is_causal"),
    "all": (lambda x: x.tril().all(-1, keepdim=True) | x.tril(), "is_causal"),
}


@pytest.mark.parametrize("case", OF_ALL_PAIRS)
def test_a_constant_that_is_computed_of_all_pairs_at_once(case):
    """Of data it would be a bias, see test_unread_masks."""
    make, text = OF_ALL_PAIRS[case]
    mask_of = lambda q, k: make(torch.ones(S, S, dtype=torch.bool))  # noqa: E731
    found = read(attend(mask_of), *operands(S))
    assert found.text == text
    check(found, *operands(S))


def ids_row_by_row(q, k, other):
    ids = torch.zeros(S, dtype=torch.long)
    for i in range(S // 2):
        ids[2 * i : 2 * i + 2] = i // 3
    return (ids[:, None] == ids) & (other[:, None, :, None] == other[:, None, None])


@pytest.mark.parametrize(
    ("mask_of", "data", "text"),
    [
        (
            lambda q, k, x: row_by_row(q, k) & x[:, None, None, :],
            torch.rand(2, S) > 0.2,
            "causal, key padding",
        ),
        (ids_row_by_row, torch.randint(0, 3, (2, S)), "chunks of 6, same document"),
    ],
    ids=["padding", "ids"],
)
def test_beside_data(mask_of, data, text):
    found = read(attend(mask_of), *operands(S), data)
    assert found.text == text
    check(found, *operands(S), data)
    check(found, *operands(S), ~data)


def test_many_steps_of_data_are_a_bias():
    def mask_of(q, k, lengths):
        mask = torch.zeros(2, 1, S, S, dtype=torch.bool)
        for i in [*range(S)] * 4:
            mask[:, :, i] = (torch.arange(S) < lengths[:, None] + i)[:, None]
        return mask

    lengths = torch.tensor([3, 5])
    found = read(attend(mask_of), *operands(S), lengths)
    assert found.text == "unread"
    assert "steps, one after another" in found.masks[0].unread.reason
    check(found, *operands(S), lengths)


def test_what_has_no_form():
    seen = torch.tensor([[True, False, True], [False, True, False]])[None, None]
    assert formula_of(seen[..., :1, :]) is not None  # what it hides has none
    assert formula_of(seen[..., [1], :]) is not None
    assert formula_of(F.pad(seen, (1, 1))) is None
    assert numbers_in(torch.tensor([[0.0, torch.nan]])[None, None]) is None
