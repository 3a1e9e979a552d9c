"""Tensors of equal values that lie in memory in every way that views can make."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """x, its dimensions lying in memory in this order."""
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    return x.permute(*order).contiguous().permute(*inverse)


def arrangements(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors: permuted, sliced and expanded memory in every dimension.

    All but the expanded ones have the values of x. Around sliced ones lie NaNs, or the
    lowest number of the dtype.
    """
    for order in itertools.permutations(range(x.ndim)):
        yield f"order {order}", in_memory_order(x, order)
    for dim in range(x.ndim):
        if not x.numel():
            continue
        for step in (1, 2):
            yield f"each {step} of dim {dim}", _sliced(x, dim, step)
        yield f"expanded on dim {dim}", x.narrow(dim, 0, 1).expand(x.shape)


def _sliced(x: Tensor, dim: int, step: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * step + 3
    if x.is_floating_point():
        memory = x.new_full(shape, torch.nan)
    else:
        lowest = 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).min
        memory = x.new_full(shape, lowest)
    index = (slice(None),) * dim + (slice(1, 1 + x.shape[dim] * step, step),)
    part = memory[index]
    part.copy_(x)
    return part
