"""Calls that move tokens of sharded sequences: each rank sends what is elsewhere after.

DTensor gathers a sequence for a slice, a shift, padding or an assignment to a range.
Here the result is sharded as its source is, and only tokens whose rank changes travel,
by cp::moved_tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.geometry import token_pieces
from cpcompile.geometry.layout import Layout, leaves_ranks_empty
from cpcompile.geometry.lengths import (
    LengthNotSymbolic,
    Size,
    expected,
    is_symbol,
    require,
)
from cpcompile.geometry.token_pieces import Joined, Piece
from cpcompile.ops.comm.moved_tokens import WHOLE
from cpcompile.ops.dtensor.local_part import contiguous_strides, dtensor_of
from cpcompile.torch_private.distributed import StridedShard, TensorMeta

from ..graph.constant_arguments import MeshAxis
from .placement_calls import cp_replicate
from .token_picks import cp_pick_tokens

_LEAST = 8
"""Tokens per rank from which a length may stay a symbol.

Ranks have numbers of tokens that differ by few; what torch asks of them (Is it 1?) has
one answer on all ranks then, so that all have the same guards.
"""

_MOVES: dict[str, Callable[..., Joined]] = {
    "slice": lambda lengths, *args: token_pieces.sliced(*lengths, *args),
    "roll": lambda lengths, *args: token_pieces.rolled(*lengths, *args),
    "flip": lambda lengths: token_pieces.flipped(*lengths),
    "pad": lambda lengths, *args: token_pieces.padded(*lengths, *args),
    "cat": token_pieces.concatenated,
    "assign": lambda lengths, start, stop, step: token_pieces.assigned(
        lengths[0], start, stop, step, len(lengths) - 1 or token_pieces.FILL
    ),
}


def cp_move_tokens(
    xs: Sequence[Tensor],
    cp_axis: MeshAxis,
    dim: int,
    how: str,
    /,
    *args: Any,
    fill: float = 0.0,
    layout: str = Layout.CONTIGUOUS.value,
) -> DTensor:
    """Make a sequence of tokens of others, sharded on the axis along `dim`.

    Args:
        xs: DTensors that are sharded along `dim` on the axis, or not at all there, and
            plain tensors; of one dtype, and equal but for the tokens. At least one is
            sharded. The rows of a flattened batch, whose layout is contiguous, become
            rows without a batch, but for those that are assigned to.
        how, args: "slice", start, stop, step; "roll", shift; "flip"; "pad", before,
            after, mode; "cat"; "assign", start, stop, step, where the second one is
            assigned, or `fill` where there is no second one.
        fill: the number of padding.
        layout: of the tokens that are sharded, before and after.
    """
    lengths = [x.shape[dim] for x in xs]
    joined = _MOVES[how](lengths, *args)
    for length in (*lengths, joined.length):
        if is_symbol(length):
            if expected(length) < _LEAST * cp_axis.size:
                raise LengthNotSymbolic(f"ranks have less than {_LEAST} tokens")
            require(length >= _LEAST * cp_axis.size)
    split = [x for x in xs if isinstance(x, DTensor) and _is_split(x, cp_axis, dim)]
    like = split[0]
    locals_ = []
    for x in xs:
        full = x if isinstance(x, DTensor) else cp_replicate(x, cp_axis)
        locals_.append(_local(full, like, cp_axis, dim))
    names = [
        layout + _batch(x, cp_axis) if _is_split(x, cp_axis, dim) else WHOLE for x in xs
    ]
    result = list(like.placements)
    if how != "assign" or like is not xs[0]:
        result[cp_axis.axis] = Shard(dim)
    of_result = layout if result[cp_axis.axis] == Shard(dim) else names[0]
    local = torch.ops.cp.moved_tokens(
        locals_,
        dim,
        lengths,
        " ".join((*names, of_result)),
        [*chain.from_iterable(joined.pieces)],
        joined.length,
        fill,
        cp_axis.mesh.get_group(cp_axis.axis).group_name,
    )
    shape = list(like.shape)
    shape[dim] = joined.length
    if of_result == layout:
        return dtensor_of(local, like.device_mesh, result, shape)
    strides = contiguous_strides(torch.Size(shape))
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    # It says more of a placement than `placements`: how a strided one is read.
    spec = dataclasses.replace(like._spec, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def cp_part_rows(x: DTensor, cp_axis: MeshAxis, dim: int, batch: int) -> DTensor:
    """Deal out the tokens of each sequence of a batch, whose rows are dealt out.

    x [.., batch * tokens, ..] -> [.., batch, tokens, ..], sharded on the axis.
    """
    rows, local = x.shape[dim], x._local_tensor
    if batch > 1:
        local = torch.ops.cp.moved_tokens(
            [local],
            dim,
            [rows],
            f"{Layout.CONTIGUOUS.value} {Layout.CONTIGUOUS.value}*{batch}",
            [*Piece(0, 0, rows, 0)],
            rows,
            0.0,
            cp_axis.mesh.get_group(cp_axis.axis).group_name,
        )
    placements = list(x.placements)
    placements[cp_axis.axis] = Shard(dim + 1)
    shape = [*x.shape[:dim], batch, rows // batch, *x.shape[dim + 1 :]]
    return dtensor_of(
        local.unflatten(dim, (batch, -1)), x.device_mesh, placements, shape
    )


def cp_split_tokens(
    x: DTensor,
    cp_axis: MeshAxis,
    dim: int,
    sizes: Sequence[int],
    layout: str = Layout.CONTIGUOUS.value,
) -> list[Tensor]:
    """Cut a sequence into some, each sharded on the axis along `dim`.

    Every rank has all of a part that would leave ranks without a token.
    """
    parts: list[Tensor] = []
    start = 0
    for size in sizes:
        if are_few(size, cp_axis.size):
            every: list[Any] = [slice(None)] * x.ndim
            every[dim] = slice(start, start + size)
            parts.append(cp_pick_tokens(x, cp_axis, dim, tuple(every), layout))
        else:
            cut = (start, start + size, 1)
            parts.append(
                cp_move_tokens([x], cp_axis, dim, "slice", *cut, layout=layout)
            )
        start += size
    return parts


def are_few(tokens: Size, ranks: int) -> bool:
    """Tell whether ranks would be left without a token; one token is not shared."""
    here = expected(tokens)
    return here < 2 or leaves_ranks_empty(here, ranks)


def _local(x: DTensor, like: DTensor, cp_axis: MeshAxis, dim: int) -> Tensor:
    """Return this rank's part of a source, or all of one that every rank has."""
    placements: list[Placement] = list(like.placements)
    placements[cp_axis.axis] = Replicate()
    if _is_split(x, cp_axis, dim):
        placements[cp_axis.axis] = x.placements[cp_axis.axis]
    return x.redistribute(placements=placements)._local_tensor


def _is_split(x: Tensor, cp_axis: MeshAxis, dim: int) -> bool:
    if not isinstance(x, DTensor):
        return False
    placement = x.placements[cp_axis.axis]
    return placement.is_shard(dim) or (
        isinstance(placement, StridedShard) and placement.dim == dim
    )


def _batch(x: Tensor, cp_axis: MeshAxis) -> str:
    """Return what the name of a layout says of rows of a flattened batch."""
    assert isinstance(x, DTensor)
    placement = x.placements[cp_axis.axis]
    if isinstance(placement, StridedShard):
        return f"*{placement.split_factor}"
    return ""
