"""Convolutions on shards: each rank borrows the tokens that it reads beside its own.

Of channels, which groups keep apart, a rank needs its own alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.shares import sharing_rows

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def padded_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    groups: int,
    apart: int | None = None,
) -> Tensor:
    """Run F.conv1d, conv2d or conv3d, with zeros before and after that may differ.

    Args:
        input: [B, C, ..] or [C, ..]; a DTensor may be sharded along batch and
            positions, and along channels in parts of whole groups. Its weight and bias
            are whole then.
        weight, bias, stride, dilation, groups: as torch takes them, per dimension.
        padding: zeros (before, after) per dimension of positions.
        apart: a dimension of a DTensor in which each rank's part is a sequence of its
            own: the results are those of all parts, one after another.

    Along another sharded dimension there are as many results as positions, or windows
    lie side by side, whole ones on every rank.

    Raises: ValueError for a DTensor with other placements or numbers.
    """
    if isinstance(input, DTensor):
        args = (input, weight, bias, stride, padding, dilation, groups, apart)
        return _of_shards(*args)
    return _convolved(input, weight, bias, stride, padding, dilation, groups)


def _of_shards(
    x: DTensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    groups: int,
    apart: int | None,
) -> DTensor:
    mesh, first = x.device_mesh, x.ndim - len(stride)
    batch = {Shard(dim) for dim in range(first - 1)}
    own_groups = groups_of_rank(x, first - 1, groups, weight.shape[0])
    local, remaining, empty = local_part(x), [tuple(pair) for pair in padding], None
    shared = sharing_rows(mesh, x.placements, x.numel(), local.numel())
    for axis, placement in enumerate(x.placements):
        if placement.is_replicate() or placement in batch:
            continue
        if placement == Shard(first - 1) and own_groups is not None:
            continue
        dim = placement.dim if type(placement) is Shard else -1
        if dim < first or x.placements.count(placement) > 1:
            raise ValueError(
                f"a convolution of a DTensor {tuple(x.shape)} with placements "
                f"{x.placements}; needed its batch or positions in one part per rank, "
                f"or channels in parts of whole groups, of {groups}"
            )
        if dim == apart:
            continue
        before, after = remaining[dim - first]
        reach = dilation[dim - first] * (weight.shape[dim - first + 2] - 1)
        if is_side_by_side(x, axis, dim, reach + 1, stride[dim - first]):
            if before or after:
                raise ValueError(
                    f"a convolution of windows side by side with {before} zeros before "
                    f"and {after} after; needed none"
                )
            continue
        if stride[dim - first] != 1 or before + after != reach:
            raise ValueError(
                f"a convolution of {x.shape[dim]} sharded positions with stride "
                f"{stride[dim - first]}, {before} zeros before and {after} after, "
                f"whose kernel reads {reach} others; needed as many results"
            )
        remaining[dim - first] = (0, 0)
        group, halo = mesh.get_group(axis).group_name, (before, after)
        count = local.shape[dim]
        if reach:
            local = torch.ops.cp.halo_exchange(local, dim, x.shape[dim], *halo, group)
        if count == 0:  # torch has no convolution without a result
            empty = dim
            local = F.pad(local, (0, 0) * (x.ndim - 1 - dim) + (0, 1))
    grads: list[Placement] = [
        Replicate() if p.is_replicate() else Partial() for p in x.placements
    ]
    own_weight = whole_weight(weight, grads)
    own_bias = None if bias is None else whole_weight(bias, grads)
    if own_groups is not None:
        begin, count = (n * weight.shape[0] // groups for n in own_groups)
        own_weight = own_weight.narrow(0, begin, count)
        own_bias = None if own_bias is None else own_bias.narrow(0, begin, count)
        groups = own_groups[1]
    with shared:
        out = _convolved(
            local, own_weight, own_bias, stride, remaining, dilation, groups
        )
    if empty is not None:
        out = out.narrow(empty, 0, 0)
    sizes = window_counts(x.shape[first:], padding, dilation, weight.shape[2:], stride)
    if apart is not None:
        sizes[apart - first] = results_apart(x, out, apart)
    shape = torch.Size((*x.shape[: first - 1], weight.shape[0], *sizes))
    return dtensor_of(out.contiguous(), mesh, x.placements, shape)


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


def window_counts(
    sizes: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    taps: Sequence[int],
    stride: Sequence[int],
) -> list[int]:
    """Return how many windows each dimension of positions has."""
    return [
        (size + sum(pair) - reach * (n - 1) - 1) // step + 1
        for size, pair, reach, n, step in zip(
            sizes, padding, dilation, taps, stride, strict=True
        )
    ]


def results_apart(x: DTensor, out: Tensor, dim: int) -> int:
    """Return how many results all ranks have together, as many on each.

    x: sharded evenly along `dim`. out: the results of this rank.
    """
    parts = [
        x.device_mesh.size(axis)
        for axis, placement in enumerate(x.placements)
        if placement == Shard(dim)
    ]
    if len(parts) != 1 or x.shape[dim] % parts[0]:
        raise ValueError(
            f"a DTensor {tuple(x.shape)} with placements {x.placements}; needed "
            f"dimension {dim} in one part per rank, as long on each"
        )
    return parts[0] * out.shape[dim]


def is_side_by_side(x: DTensor, axis: int, dim: int, size: int, step: int) -> bool:
    """Tell whether every rank has whole windows of positions, which do not overlap."""
    ranks = x.device_mesh.size(axis)
    return size == step and x.shape[dim] % (size * ranks) == 0


def whole_weight(x: Tensor, grads: list[Placement]) -> Tensor:
    """Return a parameter of which every rank has the gradient of its own positions."""
    if not isinstance(x, DTensor):
        return x
    if not all(p.is_replicate() for p in x.placements):
        raise ValueError(f"a weight with placements {x.placements}; needed it whole")
    return local_part(x, grads)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[Sequence[int]],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    both = [min(pair) for pair in padding]  # which the kernel adds without a copy
    more = [
        n
        for pair, common in zip(padding, both, strict=True)
        for n in (pair[1] - common, pair[0] - common)
    ][::-1]
    if any(more):
        x = F.pad(x, more)
    call = _CONVOLUTIONS[len(stride)]
    return call(x, weight, bias, list(stride), both, list(dilation), groups)
