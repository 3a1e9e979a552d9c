"""Look-ups of tokens at places that are data: each rank reads for its own tokens.

    x[b, at]                x: [B, S, C], at: [B, S, K], both in parts along S
      ->
    x in whole, and this rank's rows of `at`: [B, s, K, C]

DTensor would gather what is read, K times the tokens. Ranks add their gradients up for
all tokens, and each gets the sum for its own.

    x[:, at] = y            x: [B, S, C] in parts along S, at: [K], y: [B, K, C]
      ->
    y in whole, of which each rank writes what lies in its part
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.layout import Chunks
from cpcompile.ops.dtensor.local_part import dtensor_of

from ..graph.constant_arguments import MeshAxis

aten = torch.ops.aten


def index_rules(
    cp_axis: MeshAxis, row_by_row: Callable[[Any], Callable[..., Any]]
) -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call.

    row_by_row: returns what to run for a look-up or a write along one dimension, where
        that is not the one that is cut.
    """
    rules: dict[Any, Callable[..., Any]] = {
        aten.index.Tensor: _index,
        aten.index_put.default: _index_put,
        aten._unsafe_index_put.default: _index_put,
        aten.index_select.default: _index_select,
        aten.index_add.default: _index_add,
        aten.index_copy.default: _index_copy,
        aten.index_fill.int_Scalar: _index_fill,
        aten.select_scatter.default: _select_scatter,
        aten.gather.default: functools.partial(_gather, row_by_row),
        aten.scatter_add.default: functools.partial(_scatter_add, row_by_row),
    }
    return {
        call: functools.partial(rule, cp_axis=cp_axis) for call, rule in rules.items()
    }


def _index(x: Any, indices: Sequence[Any], *, cp_axis: MeshAxis) -> Any:
    block = _Block.of(cp_axis, indices)
    if block is None or not _is_on(cp_axis, x):
        return aten.index.Tensor(x, indices)
    result = aten.index.Tensor(_whole(x), block.own)
    shape = list(result.shape)
    shape[block.dim] = block.size
    return _placed(result, x, cp_axis, Shard(block.dim), shape)


def _index_put(
    x: Any,
    indices: Sequence[Any],
    values: Any,
    accumulate: bool = False,
    *,
    cp_axis: MeshAxis,
) -> Any:
    given = [(dim, at) for dim, at in enumerate(indices) if at is not None]
    (dim, at), *others = given
    if not (accumulate or others):
        if at.dtype is torch.bool and values.numel() == 1:
            for _ in range(x.ndim - dim - at.ndim):
                at = at.unsqueeze(-1)
            return aten.where.self(at, values, x)
        is_places = at.dtype is not torch.bool and at.ndim == 1
        if is_places and _is_on(cp_axis, x, Shard(dim)):
            return write_rows(cp_axis, x, values, dim, at)
    adds = accumulate and x.dtype.is_floating_point
    block = _Block.of(cp_axis, indices) if adds else None
    if block is None or not _is_on(cp_axis, values, Shard(block.dim)):
        return aten.index_put.default(x, indices, values, accumulate)
    own = _share(cp_axis, x), block.own, values._local_tensor
    result = aten.index_put.default(*own, True)
    return _placed(result, values, cp_axis, Partial(), x.shape)


def _index_select(x: Any, dim: int, index: Any, *, cp_axis: MeshAxis) -> Any:
    if not _is_on(cp_axis, index, Shard(0)) or not _is_on(cp_axis, x):
        return aten.index_select.default(x, dim, index)
    result = aten.index_select.default(_whole(x), dim, index._local_tensor)
    shape = list(x.shape)
    shape[dim] = index.shape[0]
    return _placed(result, x, cp_axis, Shard(dim % x.ndim), shape)


def _index_add(x: Any, dim: int, index: Any, values: Any, *, cp_axis: MeshAxis) -> Any:
    at = Shard(dim % values.ndim)
    if _is_on(cp_axis, x, at) and index.ndim == 1:
        return _add_rows(cp_axis, x, values, at.dim, index)
    cut = _is_on(cp_axis, values, at) and _is_on(cp_axis, index, Shard(0))
    if not cut or not x.dtype.is_floating_point:
        return aten.index_add.default(x, dim, index, values)
    own = _share(cp_axis, x), dim, index._local_tensor, values._local_tensor
    return _placed(aten.index_add.default(*own), values, cp_axis, Partial(), x.shape)


def _add_rows(cp_axis: MeshAxis, x: DTensor, values: Any, dim: int, index: Any) -> Any:
    """Add rows to x, in contiguous parts: each rank those of its part."""
    index, rows = (_whole(y) if isinstance(y, DTensor) else y for y in (index, values))
    local, rank = x._local_tensor, cp_axis.mesh.get_local_rank(cp_axis.axis)
    if count := local.shape[dim]:
        place = index - Chunks(x.shape[dim], cp_axis.size).start(rank)
        mine = (place >= 0) & (place < count)
        own = mine.view(-1, *[1] * (rows.ndim - 1 - dim))
        added = torch.where(own, rows, rows.new_zeros(()))
        at = [*[None] * dim, place.clamp(0, count - 1)]
        local = aten.index_put.default(local, at, added, True)  # see cut_constants
    return _placed(local, x, cp_axis, Shard(dim), x.shape)


def _index_copy(x: Any, dim: int, index: Any, values: Any, *, cp_axis: MeshAxis) -> Any:
    if not _is_on(cp_axis, x, Shard(dim % x.ndim)):
        return aten.index_copy.default(x, dim, index, values)
    return write_rows(cp_axis, x, values, dim % x.ndim, index.reshape(-1))


def _index_fill(x: Any, dim: int, index: Any, value: Any, *, cp_axis: MeshAxis) -> Any:
    if not _is_on(cp_axis, x, Shard(dim % x.ndim)):
        return aten.index_fill.int_Scalar(x, dim, index, value)
    rows = torch.full((1,) * x.ndim, value, dtype=x.dtype, device=x.device)
    return write_rows(cp_axis, x, rows, dim % x.ndim, index.reshape(-1))


def _select_scatter(
    x: Any, values: Any, dim: int, index: int, *, cp_axis: MeshAxis
) -> Any:
    if not _is_on(cp_axis, x, Shard(dim % x.ndim)):
        return aten.select_scatter.default(x, values, dim, index)
    at = slice(index, index + 1 or None)
    return write_rows(cp_axis, x, values.unsqueeze(dim), dim % x.ndim, at)


def write_rows(cp_axis: MeshAxis, x: DTensor, rows: Any, dim: int, index: Any) -> Any:
    """Return what x, in parts along a dimension, is after x[.., index, ..] = rows."""
    if isinstance(index, DTensor):
        index = _whole(index)
    here, local = rows_of_rank(x, rows, dim, index), x._local_tensor
    if here is not None:
        target, new = here
        local = aten.index_put.default(local, [None] * dim + [target], new)
    return _placed(local, x, cp_axis, Shard(dim), x.shape)


def _gather(
    row_by_row: Callable[[Any], Callable[..., Any]],
    x: Any,
    dim: int,
    index: Any,
    *,
    cp_axis: MeshAxis,
) -> Any:
    at = Shard(dim % x.ndim)
    if not _is_on(cp_axis, index, at) or not _is_on(cp_axis, x):
        return row_by_row(aten.gather.default)(x, dim, index)
    result = aten.gather.default(_whole(x), dim, index._local_tensor)
    return _placed(result, x, cp_axis, at, index.shape)


def _scatter_add(
    row_by_row: Callable[[Any], Callable[..., Any]],
    x: Any,
    dim: int,
    index: Any,
    values: Any,
    *,
    cp_axis: MeshAxis,
) -> Any:
    at = Shard(dim % x.ndim)
    cut = _is_on(cp_axis, values, at) and _is_on(cp_axis, index, at)
    if not cut or not x.dtype.is_floating_point or values.shape != index.shape:
        return row_by_row(aten.scatter_add.default)(x, dim, index, values)
    own = _share(cp_axis, x), dim, index._local_tensor, values._local_tensor
    result = aten.scatter_add.default(*own)
    return _placed(result, values, cp_axis, Partial(), x.shape)


@dataclass(frozen=True)
class _Block:
    """The places that some indices give together, of which a rank has some.

    dim: of the result, which is cut. size: of it, on all ranks. own: this rank's parts
    of the indices.
    """

    dim: int
    size: int
    own: list[Tensor | None]

    @classmethod
    def of(cls, cp_axis: MeshAxis, indices: Sequence[Any]) -> _Block | None:
        """Return that; None if no index is cut, or several are in different ways."""
        given = [(i, x) for i, x in enumerate(indices) if x is not None]
        cut = {
            (at.dim - x.ndim, x.shape[at.dim])
            for _, x in given
            if isinstance(x, DTensor)
            and type(at := x.placements[cp_axis.axis]) is Shard
        }
        if len(cut) != 1:
            return None
        ((back, size),) = cut
        own: list[Tensor | None] = [None] * len(indices)
        for i, x in given:
            has = x.ndim >= -back and x.shape[back] == size
            own[i] = _part(cp_axis, x, Shard(x.ndim + back) if has else Replicate())
        places = [i for i, _ in given]
        adjacent = places == [*range(places[0], places[-1] + 1)]
        first = places[0] if adjacent else 0
        return cls(first + max(x.ndim for _, x in given) + back, size, own)


def _part(cp_axis: MeshAxis, x: Any, at: Placement) -> Tensor:
    if not isinstance(x, DTensor):
        everywhere = [Replicate()] * cp_axis.mesh.ndim
        x = DTensor.from_local(x, cp_axis.mesh, everywhere, run_check=False)
    placements = [*x.placements]
    placements[cp_axis.axis] = at
    part: Tensor = x.redistribute(placements=placements)._local_tensor
    return part


def _is_on(cp_axis: MeshAxis, x: Any, at: Placement | None = None) -> bool:
    """Tell whether x is a DTensor that no other axis cuts, and this one as `at`."""
    if not isinstance(x, DTensor):
        return False
    here = x.placements[cp_axis.axis]
    others = [p for i, p in enumerate(x.placements) if i != cp_axis.axis]
    return at in (None, here) and all(p.is_replicate() for p in others)


def _whole(x: DTensor) -> Tensor:
    return x.redistribute(placements=[Replicate()] * len(x.placements))._local_tensor


def _placed(
    local: Tensor, like: DTensor, cp_axis: MeshAxis, at: Placement, shape: Sequence[int]
) -> DTensor:
    placements: list[Placement] = [Replicate()] * len(like.placements)
    placements[cp_axis.axis] = at
    return dtensor_of(local.contiguous(), like.device_mesh, placements, shape)


def _share(cp_axis: MeshAxis, x: Any) -> Tensor:
    """Return this rank's summand of x, to which it adds what it has."""
    if not isinstance(x, DTensor):
        everywhere = [Replicate()] * cp_axis.mesh.ndim
        x = DTensor.from_local(x, cp_axis.mesh, everywhere, run_check=False)
    share: Tensor = _whole(x) / cp_axis.size
    return share


def rows_of_rank(
    whole: DTensor, rows: Any, dim: int, index: Any
) -> tuple[Tensor, Tensor] | None:
    """Return (places, rows) of whole[.., index, ..] = rows in this rank's part.

    index: in dimension `dim`, int64 [n], the same on every rank, or a slice. rows: the
    same on every rank, or a DTensor; [.., n, ..] or what expands to it.
    """
    length, local, mesh = whole.shape[dim], whole._local_tensor, whole.device_mesh
    if isinstance(index, slice):
        index = torch.arange(*index.indices(length), device=local.device)
    count, n = local.shape[dim], index.shape[0]
    if not isinstance(rows, DTensor):
        everywhere = [Replicate()] * mesh.ndim
        rows = DTensor.from_local(rows, mesh, everywhere, run_check=False)
    placements = [Replicate() if p == Shard(dim) else p for p in whole.placements]
    rows = rows.expand((*whole.shape[:dim], n, *whole.shape[dim + 1 :]))
    # By all ranks, also by one without a part.
    rows = rows.redistribute(placements=placements).to_local().to(whole.dtype)
    if not (count and n):
        return None
    axis = whole.placements.index(Shard(dim))
    start = Chunks(length, mesh.size(axis)).start(mesh.get_local_rank(axis))
    place = torch.where(index < 0, index + length, index) - start
    mine = (place >= 0) & (place < count)
    # Every rank writes n rows: its own, and in place of each row of another rank one of
    # its own again, or, if it has none, what is there already.
    first = mine.to(torch.int8).argmax(0, keepdim=True)
    source = torch.where(mine, torch.arange(n, device=mine.device), first)
    target = torch.where(mine, place, place.index_select(0, first).clamp(0, count - 1))
    old = local.index_select(dim, target)
    return target, torch.where(mine.any(), rows.index_select(dim, source), old)
