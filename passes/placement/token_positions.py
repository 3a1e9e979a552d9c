"""Tell which tokens are written where positions are data, and by which rows.

    x[:, at] = value        x [B, S, C], at [k], value [B, k, C]
    cp_written_at(x, 1, (at,))      bool [S]
    cp_numbers_at(x, 1, (at,))      int64 [S], numbers of rows of `value`

Every rank makes them for all tokens, and cuts them as x is. Of x they read the shape.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.ops.dtensor.local_part import local_part


def cp_written_at(x: Tensor, first: int, items: tuple[Any, ...]) -> Tensor:
    """Return where x is written: bool, of the dimensions that `items` are for.

    items: numbers and tensors of numbers, for dimension `first` of x and those after
        it. None, for the first dimensions of x: each entry has its own positions.

    Raises: IndexError for a position that x has not; on GPUs the device asserts it.
    """
    sizes = x.shape[first : first + len(items)]
    mask = torch.zeros(sizes, dtype=torch.bool, device=x.device)
    return mask.index_put(_positions(x, items), mask.new_ones(()))


def cp_numbers_at(x: Tensor, first: int, items: tuple[Any, ...]) -> Tensor:
    """Return which row is written where: int64, 0 where there is none.

    Of several rows the last one, on every device: `cp_summed_at` asks again.
    """
    sizes, at = x.shape[first : first + len(items)], _positions(x, items)
    place: Tensor | int = 0
    for size, index in zip(sizes, at, strict=True):
        place = place * size + torch.where(index < 0, index + size, index)
    assert isinstance(place, Tensor)
    rows = torch.arange(place.numel(), device=x.device)
    numbers = rows.new_zeros(math.prod(sizes))
    return numbers.scatter_reduce(0, place.reshape(-1), rows, "amax").reshape(sizes)


def cp_summed_at(
    x: Tensor, first: int, items: tuple[Any, ...], value: Tensor
) -> Tensor:
    """Return the rows of a value [*A, rows, *R] with their sum for each position.

    The sum is the row that `cp_numbers_at` names; the other ones of a position are 0.
    """
    numbers = cp_numbers_at(x, first, items)[_positions(x, items)].reshape(-1)
    if not isinstance(value, DTensor):
        return torch.zeros_like(value).index_add(first, numbers, value)
    rows = local_part(value)
    total = torch.zeros_like(rows).index_add(first, numbers, rows)
    placed = (value.device_mesh, value.placements)
    return DTensor.from_local(total, *placed, run_check=False)


def _positions(x: Tensor, items: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the items as tensors of one dimension or more, as all ranks have them."""
    ndim = max(item.ndim for item in items if isinstance(item, Tensor))

    def of(place: int, item: Any) -> Tensor:
        if item is None:
            each = torch.arange(x.shape[place], device=x.device)
            return each.reshape(-1, *[1] * (ndim - 1 - place))
        if not isinstance(item, Tensor):
            return torch.full((1,), item, dtype=torch.int64, device=x.device)
        whole = item.full_tensor() if isinstance(item, DTensor) else item
        return whole.long().reshape(whole.shape or (1,))  # int32 is an index, too

    return tuple(of(place, item) for place, item in enumerate(items))
