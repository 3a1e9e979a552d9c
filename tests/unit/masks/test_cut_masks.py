"""Masks that are a part of larger ones, as buffers for the longest sequence are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tests.unit.masks.mask_builders as b
from tests.unit.masks.mask_cases import attend, check, operands, read

S, LONGEST = 21, 32


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
    q, k = operands(S)
    found = read(attend(builder), q, k, mask)
    assert found.text != "unread", found.masks[0].unread
    check(found, q, k, mask)
    check(found, q, k, buffer(dtype, *shape))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_fewer_queries_than_keys(dtype):
    mask = buffer(dtype, 1, 1)
    q, k = operands(5, S)
    found = read(attend(last_rows), q, k, mask)
    assert found.text.startswith("dense")
    check(found, q, k, mask)


def of_one_head(q, k, weight):
    """The head of a table, and tokens after one that is dropped."""
    i, j = torch.arange(S + 3)[:, None], torch.arange(S + 3)
    bias = torch.nn.functional.embedding((j - i).clamp(-3, 4) + 3, weight)
    return bias[1 : S + 1, 2 : S + 2, 1]


def of_all_heads(q, k, weight):
    i, j = torch.arange(S + 3)[:, None], torch.arange(S + 3)
    bias = weight[(j - i).clamp(-3, 4) + 3]
    return bias.permute(2, 0, 1)[None, 1:, 1 : S + 1, 2 : S + 2]


def of_picked_keys(q, k, bias):
    keys = torch.tensor([3, 1, 4, 1, 5]).repeat(8)
    return (bias[:S] * 2).index_select(1, keys)[:, 2 : S + 2]


@pytest.mark.parametrize(
    ("builder", "shape"),
    [(of_one_head, (8, 2)), (of_all_heads, (8, 3)), (of_picked_keys, (S + 1, S + 3))],
)
def test_a_look_up_of_which_a_part_is_used(builder, shape):
    data = torch.randn(shape)
    found = read(attend(builder), *operands(S), data)
    assert found.text.startswith("dense float32"), found.calls[0].unsupported
    check(found, *operands(S), data)
