"""Pooling of sharded tokens, of which every rank has a sequence of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.padded_convolution import results_apart, window_counts

POOLS: dict[str, Callable[..., Tensor]] = {
    "avg_pool1d": F.avg_pool1d,
    "avg_pool2d": F.avg_pool2d,
    "avg_pool3d": F.avg_pool3d,
    "max_pool1d": F.max_pool1d,
    "max_pool2d": F.max_pool2d,
    "max_pool3d": F.max_pool3d,
}


def windowed_pool(
    name: str,
    input: DTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    apart: int,
) -> DTensor:
    """Run a pooling of torch on the part of each rank.

    Args:
        name: one of POOLS.
        input: [B, C, ..] or [C, ..], sharded along any dimensions; of positions along
            `apart` alone.
        kernel_size, stride, padding: as torch takes them, per dimension of positions.
        dilation: of a maximum; 1 for means.
        apart: a dimension in which each rank's part is a sequence of its own: the
            results are those of all parts, one after another.

    Raises: ValueError for a DTensor with other placements.
    """
    first = input.ndim - len(kernel_size)
    for placement in input.placements:
        dim = placement.dim if type(placement) is Shard else -1
        if not (placement.is_replicate() or 0 <= dim < first or dim == apart):
            raise ValueError(
                f"{name} of a DTensor {tuple(input.shape)} with placements "
                f"{input.placements}; needed positions in parts along {apart} alone"
            )
    numbers = [list(kernel_size), list(stride), list(padding)]
    if name.startswith("max"):
        numbers.append(list(dilation))
    out = POOLS[name](local_part(input), *numbers)
    both = [(n, n) for n in padding]
    sizes = window_counts(input.shape[first:], both, dilation, kernel_size, stride)
    sizes[apart - first] = results_apart(input, out, apart)
    shape = torch.Size((*input.shape[:first], *sizes))
    return dtensor_of(out.contiguous(), input.device_mesh, input.placements, shape)
