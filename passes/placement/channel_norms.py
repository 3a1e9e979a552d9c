"""Normalisation by the means of entries that ranks share out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.padded_convolution import whole_weight

from .placement_calls import cp_reduce_partial


def cp_channel_norm(
    x: DTensor,
    dims: Sequence[int],
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> DTensor:
    """Normalise by the mean and variance of all entries along some dimensions.

    Ranks send sums, one number for each mean and one for each variance, and no entry.
    The variance is the mean square of what is left without the mean, as torch has it:
    a mean of squares would lose the digits of a large mean.

    Args:
        x: [B, C, ..], sharded along any dimensions but 1.
        dims: those that a mean is over: positions, and perhaps 0. Without any, x is
            normalised by `running`.
        running: a mean and a variance, [C]; with dims they are brought up to date, in
            place.
        momentum: how much of x's own mean and variance enters these.
        weight, bias: [C], the same on every rank.
        eps: added to the variance.
    """
    own = _wide(local_part(x))
    if not dims:
        assert running is not None
        mean, variance = (_per_channel(_local(r), own) for r in running)
        return _placed((own - mean) * torch.rsqrt(variance + eps), x, weight, bias)
    means = _Mean.of(x, own, 0 in dims)
    centred = own - means.own
    variances = _Mean.of(x, centred * centred, 0 in dims)
    if running is not None:
        unbiased = variances.entries / (variances.entries - 1)
        _update(running[0], means.whole, 1.0, momentum)
        _update(running[1], variances.whole, unbiased, momentum)
    return _placed(centred * torch.rsqrt(variances.own + eps), x, weight, bias)


def cp_group_norm(
    x: DTensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> DTensor:
    """Normalise by the mean and variance of each group of channels of each sample.

    x: [B, C, ..]; weight, bias: [C]. See cp_channel_norm.
    """
    own = _wide(local_part(x)).unflatten(1, (groups, x.shape[1] // groups))
    centred = own - _Mean.of(x, own, False).own
    variance = _Mean.of(x, centred * centred, False).own
    normal = (centred * torch.rsqrt(variance + eps)).flatten(1, 2)
    return _placed(normal, x, weight, bias)


class _Mean(NamedTuple):
    """A mean over positions: of all samples, and those that this rank needs."""

    whole: DTensor
    own: Tensor
    entries: int

    @classmethod
    def of(cls, x: DTensor, entries: Tensor, over_batch: bool) -> _Mean:
        """Compute it from the entries of this rank, which are placed as x.

        entries: [B, C, ..], or with channels in groups.
        """
        dims = [*([0] if over_batch else []), *range(2, entries.ndim)]
        ones = [1] * (entries.ndim - 2)
        shape = torch.Size(
            (1 if over_batch else x.shape[0], entries.shape[1], *ones),
        )
        count = x.numel() // math.prod(shape)
        sums: list[Placement] = [
            p if p.is_replicate() or (p.is_shard(0) and not over_batch) else Partial()
            for p in x.placements
        ]
        summand = dtensor_of(
            entries.sum(dims, keepdim=True) / count, x.device_mesh, sums, shape
        )
        whole = cp_reduce_partial(summand)
        return cls(whole, local_part(whole, sums), count)


def _wide(x: Tensor) -> Tensor:
    """Return x in the number format that torch has statistics in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _update(kept: Tensor, new: DTensor, factor: float, momentum: float) -> None:
    """Move running statistics, [C], towards new ones, [1 or B, C, ..]."""
    mean = (new.detach().mean(0).flatten() * factor).to(kept.dtype)
    if isinstance(mean, DTensor) and not isinstance(kept, DTensor):
        mean = mean.full_tensor()
    kept.lerp_(mean, momentum)


def _placed(
    own: Tensor, x: DTensor, weight: Tensor | None, bias: Tensor | None
) -> DTensor:
    """Return the normal entries of this rank, scaled, as x is placed."""
    grads: list[Placement] = [
        p if p.is_replicate() else Partial() for p in x.placements
    ]
    if weight is not None:
        own = own * _per_channel(whole_weight(weight, grads), own)
    if bias is not None:
        own = own + _per_channel(whole_weight(bias, grads), own)
    return dtensor_of(
        own.to(x.dtype).contiguous(), x.device_mesh, x.placements, x.shape
    )


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    return numbers.to(x.dtype).view(1, -1, *(1 for _ in range(x.ndim - 2)))
