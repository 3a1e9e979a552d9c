"""Calls that move tokens to other ranks, where DTensor would gather the sequence.

slice(x, 1, 1, S)      shifts   ->  cp.moved_tokens: each rank sends what it lends
slice_backward, constant_pad_nd, roll, flip, cat, slice_scatter: likewise
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private.distributed import StridedShard
from cpcompile.torch_private.operators import OpOverload

from ..graph.constant_arguments import MeshAxis
from ..placement.token_moves import are_few, cp_move_tokens, cp_split_tokens

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
MOST_PICKS = 8
"""More picks of one value cost more messages than to gather it once."""
Move = Callable[..., tuple[Any, ...] | None]
"""Returns sources, dimension, what moves them, how, and perhaps the number of padding.

None if nothing moves.
"""


def move_rules(
    cp_axis: MeshAxis,
    layout: Layout = Layout.CONTIGUOUS,
    lengths: Collection[Any] = (),
) -> dict[Any, Callable[..., Any]]:
    """Return the rules for tokens in a layout, by call.

    lengths: of sequences, so that rows of a batch of them are known.
    """
    rules: dict[Any, Callable[..., Any]] = {
        call: functools.partial(_run, call, move, cp_axis, layout, lengths)
        for call, move in MOVES.items()
    }
    for call in SPLITS:
        rules[call] = functools.partial(_split, call, cp_axis, layout, lengths)
    return rules


def _run(
    call: OpOverload,
    move: Move,
    cp_axis: MeshAxis,
    layout: Layout,
    lengths: Collection[Any],
    *args: Any,
    **options: Any,
) -> Any:
    moved = None if options else move(cp_axis, *args)
    if moved is None or not all(
        is_known(x, cp_axis, layout, lengths) for x in moved[0]
    ):
        return call(*args, **options)
    sources, dim, how, more, *fill = moved
    given = (sources, cp_axis, dim, how, *more)
    number = fill[0] if fill else 0.0
    return cp_move_tokens(*given, fill=number, layout=layout.value)


def _split(
    call: OpOverload,
    cp_axis: MeshAxis,
    layout: Layout,
    lengths: Collection[Any],
    x: Any,
    sizes: Any,
    dim: int = 0,
) -> Any:
    """Cut a sequence into some; few tokens of one are those of every rank."""
    dim %= x.ndim
    if not is_cut(x, cp_axis, dim) or not is_known(x, cp_axis, layout, lengths):
        return call(x, sizes, dim)
    total, parts = x.shape[dim], sizes
    if isinstance(sizes, int):
        starts = range(0, 0 if is_symbol(total) else total, sizes)
        parts = [min(sizes, total - start) for start in starts]
    few = [n for n in parts if are_few(n, cp_axis.size)]
    if any(map(is_symbol, [total, *parts])) or len(few) > MOST_PICKS:
        return call(x, sizes, dim)
    return cp_split_tokens(x, cp_axis, dim, parts, layout.value)


def is_cut(x: Any, cp_axis: MeshAxis, dim: int) -> bool:
    """Tell whether x is cut along `dim`, on the axis of the sequence alone."""
    if not isinstance(x, DTensor) or are_few(x.shape[dim], cp_axis.size):
        return False
    dims = (getattr(p, "dim", None) for p in x.placements)
    return [axis for axis, cut in enumerate(dims) if cut == dim] == [cp_axis.axis]


def is_known(
    x: Any, cp_axis: MeshAxis, layout: Layout, lengths: Collection[Any]
) -> bool:
    """Tell whether each rank's tokens of x are known: rows of a batch may be not."""
    rows = x.placements[cp_axis.axis] if isinstance(x, DTensor) else None
    if not isinstance(rows, StridedShard):
        return True
    count, pieces = x.shape[rows.dim], rows.split_factor
    if is_symbol(count) or layout is not Layout.CONTIGUOUS:
        return False
    tokens = count // pieces
    return tokens % cp_axis.size == 0 or tokens in lengths


def bounds_of(size: Any, start: Any, stop: Any, step: int) -> tuple[Any, Any, Any]:
    """Return start, end and count of a slice; sizes may be symbols."""

    def place(n: Any) -> Any:
        at = n + size if n < 0 else n
        return size if at > size else max(at, 0)

    begin = place(0 if start is None else start)
    end = place(size if stop is None else stop)
    count = (end - begin + step - 1) // step if end > begin else 0
    return begin, end, count


def _slice(
    cp_axis: MeshAxis,
    x: Any,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Any:
    dim %= x.ndim
    begin, end, count = bounds_of(x.shape[dim], start, stop, step)
    if not is_cut(x, cp_axis, dim) or count == x.shape[dim]:
        return None
    if are_few(count, cp_axis.size):
        return None
    return [x], dim, "slice", (begin, end, step)


def _slice_backward(
    cp_axis: MeshAxis,
    x: Any,
    sizes: Sequence[int],
    dim: int,
    start: int,
    stop: int,
    step: int,
) -> Any:
    dim %= x.ndim
    begin, end, _ = bounds_of(sizes[dim], start, stop, step)
    if not is_cut(x, cp_axis, dim) or step != 1 or x.shape[dim] == sizes[dim]:
        return None
    return [x], dim, "pad", (begin, sizes[dim] - end, "constant")


def _pad(cp_axis: MeshAxis, x: Any, pad: Sequence[int], value: float = 0.0) -> Any:
    at = [i for i in range(0, len(pad), 2) if pad[i] or pad[i + 1]]
    if len(at) != 1 or (value and not x.dtype.is_floating_point):
        return None  # of labels every rank has all as they are
    dim = x.ndim - 1 - at[0] // 2
    before, after = pad[at[0]], pad[at[0] + 1]
    tokens = x.shape[dim] + before + after
    if not is_cut(x, cp_axis, dim) or are_few(tokens, cp_axis.size):
        return None
    return [x], dim, "pad", (before, after, "constant"), value


def _roll(
    cp_axis: MeshAxis, x: Any, shifts: Sequence[int], dims: Sequence[int] = ()
) -> Any:
    if len(dims) != 1 or not is_cut(x, cp_axis, dim := dims[0] % x.ndim):
        return None
    return [x], dim, "roll", (shifts[0],)


def _flip(cp_axis: MeshAxis, x: Any, dims: Sequence[int]) -> Any:
    if len(dims) != 1 or not is_cut(x, cp_axis, dim := dims[0] % x.ndim):
        return None
    return [x], dim, "flip", ()


def _cat(cp_axis: MeshAxis, xs: Sequence[Any], dim: int = 0) -> Any:
    tensors = [x for x in xs if isinstance(x, Tensor)]
    dim %= tensors[0].ndim
    if not any(is_cut(x, cp_axis, dim) for x in tensors):
        return None
    if len({x.dtype for x in tensors}) > 1:
        return None
    return tensors, dim, "cat", ()


def _slice_scatter(
    cp_axis: MeshAxis,
    x: Any,
    source: Any,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> Any:
    dim %= x.ndim
    begin, end, count = bounds_of(x.shape[dim], start, stop, step)
    if not is_cut(x, cp_axis, dim) or count == x.shape[dim] or x.dtype != source.dtype:
        return None
    return [x, source], dim, "assign", (begin, end, step)


MOVES: dict[Any, Move] = {
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.constant_pad_nd.default: _pad,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.cat.default: _cat,
    aten.slice_scatter.default: _slice_scatter,
}
