"""Convolutions with zeros before and after that differ, and their groups on ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.layout import Chunks

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def padded_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Run F.conv1d, conv2d or conv3d, with zeros before and after that may differ.

    Args:
        input: [B, C, ..] or [C, ..].
        weight, bias, stride, dilation, groups: as torch takes them, per dimension.
        padding: zeros (before, after) per dimension of positions.
    """
    both = [min(pair) for pair in padding]  # which the kernel adds without a copy
    more = [
        n
        for pair, common in zip(padding, both, strict=True)
        for n in (pair[1] - common, pair[0] - common)
    ][::-1]
    if any(more):
        input = F.pad(input, more)
    call = _CONVOLUTIONS[len(stride)]
    return call(input, weight, bias, list(stride), both, list(dilation), groups)


def groups_of_rank(
    x: DTensor, dim: int, groups: int, results: int
) -> tuple[int, int] | None:
    """Return a rank's groups of channels: the first of them, and how many.

    None unless channels, dimension `dim`, are sharded, in parts of whole groups, and
    the results, so many channels, are sharded into those of the same groups.
    """
    if x.placements.count(Shard(dim)) != 1:
        return None
    axis = x.placements.index(Shard(dim))
    ranks = range(x.device_mesh.size(axis))
    taken, made = (Chunks(n, len(ranks)) for n in (x.shape[dim], results))
    counts = [taken.count(rank) * groups // x.shape[dim] for rank in ranks]
    for rank, count in enumerate(counts):
        parts = ((taken, x.shape[dim]), (made, results))
        if not count or any(c.count(rank) * groups != count * n for c, n in parts):
            return None
    own = x.device_mesh.get_local_rank(axis)
    return sum(counts[:own]), counts[own]
