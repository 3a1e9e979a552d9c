"""Numbers that only data tells, checked: cp::row_numbers and cp::expert_numbers.

cp::row_numbers: which row of a value goes to which True entry of a mask.

    x[mask] = value            mask   F T T F T
                               value  a b c
      ->
    numbers = cp::row_numbers(mask, 3, ...)         - 0 1 - 2
    where(mask, value[numbers], x)                  x a b x c

The n-th True entry, in row-major order, gets row n: a cumulative sum of integers that
every rank has. Entries that are False get some row, in turn, so that a kernel that adds
up gradients by number does not add zeros to one row for all of them.

cp::expert_numbers: what sorts tokens by expert, if no number is negative.

    experts = table[ids]                    looked up, so that only data tells
    numbers = cp::expert_numbers(experts, ...)
    sort(numbers)

Rows with negative numbers come first when they are sorted, and nobody counts them as
rows of an expert: all others would be taken for those of another expert, and a rank
with some of the tokens would take other rows for them than one process.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("cp::row_numbers", mutates_args=())
def row_numbers(
    mask: Tensor, rows: int, exact: bool, by_token: bool, where: str
) -> Tensor:
    """Return the number of the row of every entry of a mask, or of each token's first.

    Args:
        mask: bool, of any shape.
        rows: how many there are.
        exact: whether there has to be one True entry for each row, as for x[mask] =
            value; else as many rows or more, as for masked_scatter.
        by_token: the mask is [..., entries], and the result is [...]: how many True
            entries are in front of those of this token.
        where: the line of the program, for the message.

    Returns: int64; mask.shape, or mask.shape[:-1] if by_token.

    Raises: RuntimeError; on a GPU a device-side assertion with the same text.
    """
    counts = (mask.sum(-1) if by_token else mask.to(torch.int64)).reshape(-1)
    ends = counts.cumsum(0)
    total = ends[-1] if len(ends) else ends.sum()
    fits = total == rows if exact else total <= rows
    needed = "one row for each" if exact else "at least one row for each"
    problem = f"a mask is True at %s, and {rows} rows are given; needed {needed}"
    if mask.is_cpu:
        if not fits:
            message = problem % f"{int(total)} entries"
            raise RuntimeError(f"{where}: shape mismatch: {message}")
    else:
        message = problem % "another number of entries"
        torch._assert_async(fits, f"{where}: shape mismatch: {message}")
    if by_token:
        return (ends - counts).reshape(mask.shape[:-1])
    fallback_rows = torch.arange(len(ends), device=mask.device) % max(rows, 1)
    numbers = torch.where(counts == 1, ends - 1, fallback_rows)
    return numbers.clamp(max=max(rows - 1, 0)).reshape(mask.shape)


@row_numbers.register_fake
def _(mask: Tensor, rows: int, exact: bool, by_token: bool, where: str) -> Tensor:
    shape = mask.shape[:-1] if by_token else mask.shape
    return mask.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("cp::expert_numbers", mutates_args=())
def expert_numbers(numbers: Tensor, where: str) -> Tensor:
    """Return a contiguous copy of the numbers of experts.

    Args:
        numbers: int, of any shape.
        where: the line of the program, for the message.

    Raises: RuntimeError if one is negative; on a GPU a device-side assertion with the
        same text.
    """
    message = f"{where}: tokens are sorted by expert, and the number of one is negative"
    right = (numbers >= 0).all()
    if not numbers.is_cpu:
        torch._assert_async(right, message)
    elif not right:
        raise RuntimeError(message)
    return numbers.clone(memory_format=torch.contiguous_format)


@expert_numbers.register_fake
def _(numbers: Tensor, where: str) -> Tensor:
    return numbers.new_empty(numbers.shape)
