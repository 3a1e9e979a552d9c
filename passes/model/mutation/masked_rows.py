"""Write rows where a mask is True, in a form of which each rank can do its part.

    x[mask] = value
      ->
    numbers = cp.row_numbers(mask, rows=len(value))
    x = write_rows(x, mask, numbers, value)         x S(1), mask S(1), numbers S(1)

Mask and numbers are the same on every rank, and cut as x is. The value has one row for
each True entry. It is a short sequence of its own: every rank has all of it, and its
gradient is a sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


def write_rows(
    x: Tensor,
    mask: Tensor,
    numbers: Tensor | None,
    value: Any,
    dim: int = 0,
    accumulate: bool = False,
) -> Tensor:
    """Return a copy of x with rows of `value` where the mask is True.

    Args:
        x: [*A, *M, *R], where A are `dim` dimensions.
        mask: bool [*M].
        numbers: int64 [*M], the row for every entry, as of cp.row_numbers; [*M] without
            its last dimension: the row for the first True entry of a token. None: all
            entries get the same.
        value: [*A, rows, *R], or what can be expanded to it; with numbers None also
            [*A, 1, *R] or a number.
        accumulate: add the rows to what is there.
    """
    row_ndim = x.ndim - dim - mask.ndim
    where = mask[(..., *[None] * row_ndim)]
    if isinstance(value, Tensor):
        value = value.to(x.dtype)
        if numbers is not None:
            value = _rows(value, _number_each(numbers, mask, value), row_ndim)
        elif value.ndim > row_ndim:
            for _ in range(mask.ndim - 1):
                value = value.unsqueeze(-1 - row_ndim)
    # torch writes a number in the dtype of x: 0 into flags, 0.5 into integers as 0.
    return torch.where(where, x + value if accumulate else value, x).to(x.dtype)


def write_rows_(
    x: Tensor,
    mask: Tensor,
    numbers: Tensor | None,
    value: Any,
    dim: int = 0,
    accumulate: bool = False,
) -> Tensor:
    """Write rows of `value` into x where the mask is True, as write_rows, in place."""
    return x.copy_(write_rows(x, mask, numbers, value, dim, accumulate))


def _number_each(numbers: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """Return the row number of every entry, also where `numbers` has one per token."""
    if numbers.ndim == mask.ndim:
        return numbers
    before = numbers.unsqueeze(-1) + mask.cumsum(-1) - 1
    return before % max(value.shape[0], 1)


def _rows(value: Tensor, numbers: Tensor, row_ndim: int) -> Tensor:
    """Take rows by number: [*A, rows, *R] at numbers [*M] -> [*A, *M, *R].

    R are `row_ndim` dimensions. Rows are read by the call that looks up embeddings: its
    gradient is a sum over all entries.
    """
    dim = value.ndim - row_ndim - 1
    first = value.movedim(dim, 0)
    rest = first.shape[1:]
    if not statically_known_true(first.shape[0] > 0):  # the look-up needs a row
        first = torch.cat([first, first.new_zeros((1, *rest))])
    flat = first.reshape(first.shape[0], -1)
    # It has no gradient of complex numbers.
    pairs = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    result = F.embedding(numbers, pairs)
    if flat.is_complex():
        result = torch.view_as_complex(result.unflatten(-1, (-1, 2)))
    result = result.reshape(*numbers.shape, *rest)
    targets = list(range(dim, dim + numbers.ndim))
    return result.movedim(list(range(numbers.ndim)), targets)
