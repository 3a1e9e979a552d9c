"""Normalisation by the means of entries that ranks share out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .placement_calls import cp_mean, cp_whole


def cp_channel_norm(
    x: DTensor,
    dims: Sequence[int],
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalise by the mean and variance of all entries along some dimensions.

    Ranks send sums, one number for each mean and one for each variance, and no entry.
    The variance is the mean square of what is left without the mean, as torch has it:
    a mean of squares would lose the digits of a large mean.

    Args:
        x: [B, C, ..], sharded along any dimensions.
        dims: those that a mean is over. Without any, x is normalised by `running`.
        running: a mean and a variance, [C]; with dims they are brought up to date, in
            place.
        momentum: how much of x's own mean and variance enters these.
        weight, bias: [C].
        eps: added to the variance.
    """
    wide = _wide(x)
    if dims:
        mean, variance, centred = _of_entries(wide, dims)
        if running is not None:
            count = math.prod(x.shape[dim] for dim in dims)
            unbiased = variance * (count / (count - 1))
            _update(running, (mean, unbiased), momentum)
    else:
        assert running is not None
        mean, variance = (_per_channel(numbers, wide) for numbers in running)
        centred = wide - mean
    return _scaled(centred * torch.rsqrt(variance + eps), weight, bias).to(x.dtype)


def cp_group_norm(
    x: DTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise by the mean and variance of each group of channels of each sample.

    x: [B, C, ..]; weight, bias: [C]. See cp_channel_norm.
    """
    grouped = _wide(x).unflatten(1, (groups, -1))
    _, variance, centred = _of_entries(grouped, range(2, grouped.ndim))
    normal = (centred * torch.rsqrt(variance + eps)).flatten(1, 2)
    return _scaled(normal, weight, bias).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return x in the number format that torch has statistics in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _of_entries(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance along dims, which they keep, and x without its mean."""

    def mean_of(entries: Any) -> DTensor:
        return cp_whole(cp_mean(entries, tuple(dims), True, None))  # type: ignore[arg-type]

    mean = mean_of(x)
    centred = x - mean
    return mean, mean_of(centred * centred), centred


def _update(
    running: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], momentum: float
) -> None:
    """Move running statistics, [C], towards new ones, [1 or B, C, ..]."""
    for kept, value in zip(running, new, strict=True):
        own = value.detach().mean(0).flatten().to(kept.dtype)
        if isinstance(own, DTensor) and not isinstance(kept, DTensor):
            own = own.full_tensor()
        kept.lerp_(own, momentum)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * _per_channel(weight, x)
    return x if bias is None else x + _per_channel(bias, x)


def _per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.to(x.dtype).view(1, -1, *(1 for _ in range(x.ndim - 2)))
