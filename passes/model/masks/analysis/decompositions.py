"""Decompositions that write the programs of masks in few kinds of calls.

tril, masked_fill, pad, an assignment to a part  ->  where of comparisons of arange
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.torch_private.operators import get_decompositions


def _filled_like(
    x: Tensor, value: Any, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return torch.full(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)


def _without_sign(x: Tensor) -> Any:
    if x.is_floating_point() or x.is_complex():
        return NotImplemented
    return torch.where(x >= 0, x, -x)


def _copied(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.to(x).expand(x.shape)


def _flipped(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        last = x.shape[dim] - 1
        x = x.index_select(dim, torch.arange(last, -1, -1, device=x.device))
    return x


def _part_replaced(
    x: Tensor, source: Tensor, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Tensor:  # fmt: skip
    """Write slice_scatter as a choice by positions."""
    part_range = range(x.shape[dim])[start:end:step]
    if not part_range:
        return x.clone()
    position = torch.arange(x.shape[dim], device=x.device)
    place = ((position - part_range.start) // step).clamp(0, len(part_range) - 1)
    shape = [1] * x.ndim
    shape[dim] = -1
    inside = (place * step + part_range.start == position).view(shape)
    return torch.where(inside, source.index_select(dim, place), x)


def _padded(x: Tensor, pad: Sequence[int], value: Any = 0) -> Tensor:
    """Write constant_pad_nd as a choice by positions; a negative pad cuts."""
    for dim, (before, after) in zip(
        range(x.ndim - 1, -1, -1), zip(pad[::2], pad[1::2], strict=True), strict=False
    ):
        size = x.shape[dim]
        if not before and not after:
            continue
        place = torch.arange(-before, size + after, device=x.device)
        if before <= 0 and after <= 0:
            x = x.index_select(dim, place)
            continue
        if not size:  # there is nothing to pick from
            shape = [*x.shape[:dim], len(place), *x.shape[dim + 1 :]]
            x = x.new_full(shape, value)
            continue
        ones = [1] * x.ndim
        ones[dim] = -1
        inside = ((place >= 0) & (place < size)).view(ones)
        picked = x.index_select(dim, place.clamp(0, size - 1))
        x = torch.where(inside, picked, x.new_full((), value))
    return x.clone()


aten = torch.ops.aten
MASK_DECOMPOSITIONS: dict[Any, Any] = {
    **get_decompositions(
        [
            aten.tril, aten.triu, aten.masked_fill, aten.select_scatter, aten.rsub,
            aten.ones, aten.ones_like, aten.new_ones, aten.zeros, aten.zeros_like,
            aten.new_zeros, aten.new_full, aten.fill,
        ]
    ),
    aten.abs.default: _without_sign,
    aten.constant_pad_nd.default: _padded,
    aten.full_like.default: _filled_like,
    aten.copy.default: _copied,
    aten.flip.default: _flipped,
    aten.slice_scatter.default: _part_replaced,
}  # fmt: skip
