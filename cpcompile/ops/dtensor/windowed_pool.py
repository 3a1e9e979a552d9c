"""Pooling of sharded tokens in windows side by side, whole ones on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part
from cpcompile.ops.dtensor.padded_convolution import is_side_by_side, window_counts

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
) -> DTensor:
    """Run a pooling of torch on the part of each rank.

    Args:
        name: one of POOLS.
        input: [B, C, ..] or [C, ..], sharded along any dimensions.
        kernel_size, stride, padding: as torch takes them, per dimension of positions.
            Along a sharded one windows lie side by side, whole ones on every rank.
        dilation: of a maximum; 1 for means.

    Raises: ValueError for windows of positions that two ranks have.
    """
    first = input.ndim - len(kernel_size)
    for axis, placement in enumerate(input.placements):
        dim = placement.dim if type(placement) is Shard else -1
        if placement.is_replicate() or 0 <= dim < first:
            continue
        i = dim - first
        if dim < 0 or not (
            is_side_by_side(input, axis, dim, kernel_size[i], stride[i])
            and (padding[i], dilation[i]) == (0, 1)
        ):
            raise ValueError(
                f"{name} of a DTensor {tuple(input.shape)} with placements "
                f"{input.placements}, windows of {kernel_size[i]} with stride "
                f"{stride[i]}; needed whole windows on every rank, side by side"
            )
    numbers = [list(kernel_size), list(stride), list(padding)]
    if name.startswith("max"):
        numbers.append(list(dilation))
    out = POOLS[name](local_part(input), *numbers)
    both = [(n, n) for n in padding]
    sizes = window_counts(input.shape[first:], both, dilation, kernel_size, stride)
    shape = torch.Size((*input.shape[:first], *sizes))
    return DTensor.from_local(
        out.contiguous(),
        input.device_mesh,
        input.placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )
