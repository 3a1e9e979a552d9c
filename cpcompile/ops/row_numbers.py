"""cp::row_numbers: which row of a value goes to which True entry of a mask.

    x[mask] = value            mask   F T T F T
                               value  a b c
      ->
    numbers = cp::row_numbers(mask, 3, ...)         - 0 1 - 2
    where(mask, value[numbers], x)                  x a b x c

The n-th True entry, in row-major order, gets row n: a cumulative sum of integers that
every rank has. Entries that are False get some row, in turn, so that a kernel that adds
up gradients by number does not add zeros to one row for all of them.
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
