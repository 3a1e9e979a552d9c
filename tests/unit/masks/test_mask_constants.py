"""Masks whose values alone can be read, and parts of larger ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tests.unit.masks.mask_builders as b
from cpcompile.passes.model.masks.analysis.constant_masks import formula_of, numbers_in
from tests.unit.masks.mask_cases import attend, check, check_read, operands, read

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
    check_read(attend(builder), text, *operands(S))


def test_constants_of_many_steps_and_of_no_form():
    assert read(attend(row_by_row), *operands(150)).text == "is_causal"
    seen = torch.tensor([[True, False, True], [False, True, False]])[None, None]
    assert formula_of(seen[..., :1, :]) is not None  # what it hides has none
    assert formula_of(seen[..., [1], :]) is not None
    assert formula_of(F.pad(seen, (1, 1))) is None
    assert numbers_in(torch.tensor([[0.0, torch.nan]])[None, None]) is None


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
    check_read(attend(mask_of), text, *operands(S))


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
    found = check_read(attend(mask_of), text, *operands(S), data)
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


TOKENS, LONGEST = 21, 32


def first(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """nanoGPT, GPT-2: the mask of so many tokens."""
    return mask[..., : q.shape[-2], : k.shape[-2]]


def last_rows(q, k, mask):
    """GPT-2 with a cache: the queries are the last tokens."""
    return mask[..., k.shape[-2] - q.shape[-2] : k.shape[-2], : k.shape[-2]]


def every_second(q, k, mask):
    return mask[..., 1 : 2 * q.shape[-2] : 2, : 2 * k.shape[-2] : 2]


def in_other_order(q, k, mask):
    rows = torch.arange(q.shape[-2] - 1, -1, -1)
    return mask.bool().index_select(-2, rows)[..., : k.shape[-2]]


def turned(q, k, mask):
    return mask.mT[..., : q.shape[-2], : k.shape[-2]]


def kept_rows_of_a_row(q, k, mask):
    return mask[..., 4:5, : k.shape[-2]]


def of_two_buffers(q, k, mask):
    """What is cut is computed of pairs, and not pointwise alone."""
    both = mask & mask.mT if mask.dtype == torch.bool else mask + 2 * mask.mT
    return both[..., : q.shape[-2], : k.shape[-2]]


def cut_twice(q, k, mask):
    both = ~mask if mask.dtype == torch.bool else -mask
    return both[..., 3:, 2:].mT[..., : q.shape[-2], 1 : k.shape[-2] + 1].clone()


def beside_limits(q, k, mask):
    if mask.dtype != torch.bool:
        return first(q, k, mask).masked_fill(~b.causal(q, k), -torch.inf)
    return first(q, k, mask) & b.causal(q, k)


BUILDERS = [
    first,
    every_second,
    in_other_order,
    turned,
    kept_rows_of_a_row,
    of_two_buffers,
    cut_twice,
    beside_limits,
]
SHAPES = [(), (1, 1), (2, 1), (1, 2)]


def buffer(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(*shape, 2 * LONGEST, 2 * LONGEST)
    return numbers > 0 if dtype == torch.bool else numbers


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("builder", BUILDERS, ids=lambda x: x.__name__)
def test_a_part_of_a_buffer(builder, dtype, shape):
    mask = buffer(dtype, *shape)
    q, k = operands(TOKENS)
    found = read(attend(builder), q, k, mask)
    assert found.text != "unread", found.masks[0].unread
    check(found, q, k, mask)
    check(found, q, k, buffer(dtype, *shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_fewer_queries_than_keys(dtype):
    mask = buffer(dtype, 1, 1)
    q, k = operands(5, TOKENS)
    found = read(attend(last_rows), q, k, mask)
    assert found.text.startswith("dense")
    check(found, q, k, mask)


def of_one_head(q, k, weight):
    """The head of a table, and tokens after one that is dropped."""
    i, j = torch.arange(TOKENS + 3)[:, None], torch.arange(TOKENS + 3)
    bias = torch.nn.functional.embedding((j - i).clamp(-3, 4) + 3, weight)
    return bias[1 : TOKENS + 1, 2 : TOKENS + 2, 1]


def of_all_heads(q, k, weight):
    i, j = torch.arange(TOKENS + 3)[:, None], torch.arange(TOKENS + 3)
    bias = weight[(j - i).clamp(-3, 4) + 3]
    return bias.permute(2, 0, 1)[None, 1:, 1 : TOKENS + 1, 2 : TOKENS + 2]


def of_picked_keys(q, k, bias):
    keys = torch.tensor([3, 1, 4, 1, 5]).repeat(8)
    return (bias[:TOKENS] * 2).index_select(1, keys)[:, 2 : TOKENS + 2]


@pytest.mark.parametrize(
    ("builder", "shape"),
    [
        (of_one_head, (8, 2)),
        (of_all_heads, (8, 3)),
        (of_picked_keys, (TOKENS + 1, TOKENS + 3)),
    ],
)
def test_a_look_up_of_which_a_part_is_used(builder, shape):
    data = torch.randn(shape)
    found = read(attend(builder), *operands(TOKENS), data)
    assert found.text.startswith("dense float32"), found.calls[0].unsupported
    check(found, *operands(TOKENS), data)
