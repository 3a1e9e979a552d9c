"""Calls that read few tokens of a sequence, where DTensor would gather it.

x[:, -1]    x[arange(B), last]    x[:, :1]    x.gather(1, index)

Each rank gives what it has, for a sum that all get (placement/token_picks). Their
gradients, of the whole sequence, are made on each rank for its own tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.geometry.lengths import expected, hashable, is_symbol
from cpcompile.ops.dtensor.local_part import dtensor_of

from ..graph.constant_arguments import MeshAxis
from ..placement.token_moves import are_few
from ..placement.token_picks import cp_gather_at, cp_pick_tokens
from .cut_alike import placements_of
from .reduced_tokens import summed
from .sequence_moves import MOST_PICKS, bounds_of, is_cut, is_known

aten = torch.ops.aten


def is_picked_often(node: fx.Node) -> bool:
    """Tell whether a call is one of many that read single tokens of a value."""
    if node.target is not aten.select.int:
        return False
    users = node.all_input_nodes[0].users
    return sum(x.target is aten.select.int for x in users) > MOST_PICKS


def pick_rules(
    cp_axis: MeshAxis, layout: Layout, lengths: Collection[Any]
) -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call, for tokens in a layout.

    lengths: of sequences.
    """
    reads: dict[Any, Callable[..., Any]] = {
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.index.Tensor: _index,
        aten.index_select.default: _index_select,
    }
    rules: dict[Any, Callable[..., Any]] = {
        call: functools.partial(_picked, items, cp_axis, layout, lengths)
        for call, items in reads.items()
    }
    rules[aten.gather.default] = functools.partial(_gather, cp_axis, layout, lengths)
    for call, places in _BACKWARDS.items():
        rules[call] = functools.partial(_put, call, places, cp_axis, layout, lengths)
    return rules


def _picked(
    items_of: Callable[..., tuple[int, tuple[Any, ...]] | None],
    cp_axis: MeshAxis,
    layout: Layout,
    lengths: Collection[Any],
    x: Any,
    *args: Any,
) -> Any:
    """Return what a call reads; None if it reads no few tokens of shards."""
    found = items_of(cp_axis, x, *args) if isinstance(x, DTensor) else None
    if found is None or not _is_alone(cp_axis, x, layout, lengths):
        return None
    dim, items = found
    if any(not p.is_replicate() for item in items for p in placements_of(item)):
        return None
    return cp_pick_tokens(x, cp_axis, dim, items, layout.value)


def _is_alone(
    cp_axis: MeshAxis, x: DTensor, layout: Layout, lengths: Collection[Any]
) -> bool:
    """Tell whether no other axis cuts x, and it is known which tokens ranks have."""
    others = (p for axis, p in enumerate(x.placements) if axis != cp_axis.axis)
    known = is_known(x, cp_axis, layout, lengths)
    return known and all(p.is_replicate() for p in others)


def _along(x: DTensor, dim: int, item: Any) -> tuple[int, tuple[Any, ...]]:
    every = slice(None)
    return dim, (*[every] * dim, item, *[every] * (x.ndim - 1 - dim))


def _select(cp_axis: MeshAxis, x: DTensor, dim: int, index: Any) -> Any:
    dim %= x.ndim
    return _along(x, dim, index) if is_cut(x, cp_axis, dim) else None


def _slice(
    cp_axis: MeshAxis,
    x: DTensor,
    dim: int = 0,
    start: Any = None,
    stop: Any = None,
    step: int = 1,
) -> Any:
    dim %= x.ndim
    begin, end, count = bounds_of(x.shape[dim], start, stop, step)
    if not is_cut(x, cp_axis, dim) or not are_few(count, cp_axis.size):
        return None
    return _along(x, dim, slice(begin, end, step)) if expected(count) else None


def _index(cp_axis: MeshAxis, x: DTensor, indices: Sequence[Any]) -> Any:
    items = [slice(None) if at is None else at for at in indices]
    items += [slice(None)] * (x.ndim - len(items))
    if any(isinstance(at, Tensor) and at.dtype is torch.bool for at in items):
        return None
    dim = next((d for d in range(x.ndim) if is_cut(x, cp_axis, d)), None)
    if dim is None or not isinstance(items[dim], Tensor):
        return None
    block = torch.broadcast_shapes(*(x.shape for x in items if isinstance(x, Tensor)))
    read = math.prod(map(expected, block))
    given = (x.shape[d] for d, at in enumerate(items) if isinstance(at, Tensor))
    return None if 2 * read > math.prod(map(expected, given)) else (dim, tuple(items))


def _index_select(cp_axis: MeshAxis, x: DTensor, dim: int, index: Any) -> Any:
    before = [None] * (dim % x.ndim)
    return None if index.ndim != 1 else _index(cp_axis, x, [*before, index])


def _gather(
    cp_axis: MeshAxis,
    layout: Layout,
    lengths: Collection[Any],
    x: Any,
    dim: int,
    index: Any,
) -> Any:
    dim %= x.ndim
    if not is_cut(x, cp_axis, dim) or not _is_alone(cp_axis, x, layout, lengths):
        return None
    placements = placements_of(index)
    if any(p.is_partial() for p in placements) or not index.ndim:
        return None
    # Where each rank reads for its own tokens, what is read is cut, too.
    most = cp_axis.size if any(not p.is_replicate() for p in placements) else 1
    if 2 * most * expected(index.shape[dim]) > expected(x.shape[dim]):
        return None
    if placements:
        index = index.redistribute(placements=[Replicate()] * len(placements))
    return cp_gather_at(x, cp_axis, dim, index, layout.value)


def _put(
    call: Any,
    places: Callable[..., tuple[Any, Any, Any]],
    cp_axis: MeshAxis,
    layout: Layout,
    lengths: Collection[Any],
    grad: Any,
    sizes: Sequence[Any],
    dim: int,
    *how: Any,
) -> Any:
    """Return the gradient of a sequence of which few tokens were read; None if not."""
    dim %= len(sizes)
    length = sizes[dim]
    if hashable(length) not in lengths or is_symbol(length):
        return None
    begin, count, step = places(length, *how)
    if not are_few(count, cp_axis.size) or are_few(length, cp_axis.size):
        return None
    grad = summed(grad)
    if any(not p.is_replicate() for p in placements_of(grad)):
        return None
    own = grad._local_tensor if isinstance(grad, DTensor) else grad
    rank = cp_axis.mesh.get_local_rank(cp_axis.axis)
    tokens = TokenLayout.of(layout, length, cp_axis.size)
    if call is aten.select_backward.default:
        own = own.unsqueeze(dim)
    ahead = tokens.positions(rank, own.device) - begin
    number = torch.div(ahead, step, rounding_mode="floor")
    read = (ahead % step == 0) & (number >= 0) & (number < count)
    rows = own.index_select(dim, number.clamp(0, count - 1))
    read = read.reshape(-1, *[1] * (len(sizes) - 1 - dim))
    local = torch.where(read, rows, rows.new_zeros(()))
    placements: list[Placement] = [Replicate()] * cp_axis.mesh.ndim
    placements[cp_axis.axis] = Shard(dim)
    return dtensor_of(local, cp_axis.mesh, placements, sizes)


def _one(length: int, index: int) -> tuple[int, int, int]:
    return index % length, 1, 1


def _some(length: int, start: Any, stop: Any, step: int) -> tuple[int, int, int]:
    begin, _, count = bounds_of(length, start, stop, step)
    return begin, count, step


_BACKWARDS: dict[Any, Callable[..., Any]] = {
    aten.select_backward.default: _one,
    aten.slice_backward.default: _some,
}
PICKS = (
    *(aten.select.int, aten.slice.Tensor, aten.index.Tensor),
    *(aten.index_select.default, aten.gather.default),
)
PUTS = tuple(_BACKWARDS)
