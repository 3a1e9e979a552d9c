"""Calls that read windows of tokens: convolutions, pooling, and torch's unfold.

    x: [B, C, 61], 31 and 30 tokens on 2 ranks
    cp_whole.window_convolution(x, w, .., stride 2)       31 results, 16 and 15
      ->
    spans = cp.moved_tokens(x)                      what the windows of 16 results read
    convolution(spans, w, .., stride 2)             of which rank 1 keeps 15

A rank gets all that its windows read in one message, computes their results, and sends
the gradients of what it borrowed back in one. A transposed convolution is that way back
forward. Of channels, which groups keep apart, a rank needs its own alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Chunks, Layout
from cpcompile.geometry.token_pieces import windowed
from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.ops.dtensor.shares import sharing_rows
from cpcompile.ops.window_convolution import (
    CONVOLUTION,
    CONVOLUTION_BACKWARD,
    window_convolution,
    window_convolution_backward,
)
from cpcompile.torch_private import pytree

from ..graph.constant_arguments import MeshAxis
from ..placement.token_moves import are_few
from .local_calls import replicated

aten = torch.ops.aten
Ints = Sequence[int]


def window_rules(cp_axis: MeshAxis) -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call."""
    rules: dict[Any, Callable[..., Any]] = {
        CONVOLUTION: _convolution,
        CONVOLUTION_BACKWARD: _convolution_backward,
        aten.convolution.default: _transposed,
        aten.convolution_backward.default: _transposed_backward,
        aten.unfold.default: _unfold,
        aten.unfold_backward.default: _unfold_backward,
        aten.avg_pool2d.default: _mean_pool,
        aten.avg_pool2d_backward.default: _mean_pool_backward,
        aten.max_pool2d_with_indices.default: _max_pool,
        aten.max_pool2d_with_indices_backward.default: _max_pool_backward,
    }
    return {call: functools.partial(rule, cp_axis) for call, rule in rules.items()}


@dataclass(frozen=True)
class _Spans:
    """What ranks read of a sequence for their windows, as many on each.

    dim: of the tokens. tokens: in the sequence. windows: in all. step: between two.
    size: tokens of one. before: tokens that are missing before the first one.
    """

    cp_axis: MeshAxis
    dim: int
    tokens: int
    windows: int
    step: int
    size: int
    before: int

    @property
    def is_worth_it(self) -> bool:
        """Tell whether a rank reads less than the sequence, for windows of its own."""
        few = are_few(self.windows, self.cp_axis.size)
        return not few and self.length <= self.tokens

    @property
    def rank(self) -> int:
        return self.cp_axis.mesh.get_local_rank(self.cp_axis.axis)

    @property
    def own(self) -> int:
        """The windows of a rank; the last ranks may keep fewer."""
        return -(-self.windows // self.cp_axis.size)

    @property
    def length(self) -> int:
        return (self.own - 1) * self.step + self.size

    def kept(self, rows: int) -> int:
        """Return how many of `rows` in all are those of this rank."""
        return Chunks(rows, self.cp_axis.size).count(self.rank)

    def of(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return what this rank's windows read; x: its tokens. fill: of no token."""
        if self._are_own:
            return _longer(x, self.dim, self.length)
        how, pieces, length, group = self._how
        spans: Tensor = torch.ops.cp.moved_tokens(
            [x.contiguous()], self.dim, [self.tokens], how, pieces, length, fill, group
        )
        return spans

    def back(self, spans: Tensor) -> Tensor:
        """Add up what ranks have for each token; return that of this rank's tokens."""
        if self._are_own:
            return _longer(spans, self.dim, self.kept(self.tokens))
        how, pieces, length, group = self._how
        (x,) = torch.ops.cp.moved_tokens_backward(
            spans.contiguous(), self.dim, [self.tokens], how, pieces, length, group
        )
        return x  # type: ignore[no-any-return]

    @property
    def _are_own(self) -> bool:
        """Tell whether every rank has the tokens of its windows, as of patches."""
        tokens = -(-self.tokens // self.cp_axis.size)
        fits = self.own * self.step == tokens and self.size <= self.step
        return fits and self.before == 0

    @property
    def _how(self) -> tuple[str, list[int], int, str]:
        ranks, shift = self.cp_axis.size, self.own * self.step
        moved = windowed(self.tokens, self.length, shift, 1, self.before, ranks)
        layout = Layout.CONTIGUOUS.value
        group = self.cp_axis.mesh.get_group(self.cp_axis.axis).group_name
        pieces = [*chain.from_iterable(moved.pieces)]
        return f"{layout} {layout}", pieces, moved.length, group


def _convolution(
    cp_axis: MeshAxis,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Ints,
    before: Ints,
    counts: Ints,
    dilation: Ints,
    groups: int,
) -> Any:
    numbers = (stride, before, counts, dilation)
    x = _with_mesh(x, [weight, bias])
    if not isinstance(x, DTensor):
        return CONVOLUTION(x, weight, bias, *numbers, groups)
    x = _summed(x)
    spans = _spans(cp_axis, x, weight, *numbers)
    if spans is None:
        x = _whole_groups(_whole_positions(x), weight, groups)
    own, groups = _groups(x, weight, groups)
    w, b = _whole(weight)[own], None if bias is None else _whole(bias)[own]
    local = x._local_tensor
    if spans is not None:
        i, local = spans.dim - 2, spans.of(local)
        numbers = (stride, _with(before, i, 0), _with(counts, i, spans.own), dilation)
    with _sharing(x):
        out = window_convolution(local, w, b, *numbers, groups)
    if spans is not None:
        out = out.narrow(spans.dim, 0, spans.kept(spans.windows))
    shape = (x.shape[0], weight.shape[0], *counts)
    return dtensor_of(out.contiguous(), x.device_mesh, x.placements, shape)


def _convolution_backward(
    cp_axis: MeshAxis,
    grad: Any,
    x: Any,
    weight: Any,
    stride: Ints,
    before: Ints,
    dilation: Ints,
    groups: int,
    needed: Sequence[bool],
) -> Any:
    x = _with_mesh(x, [grad, weight])
    if not isinstance(x, DTensor):
        args = (grad, x, weight, stride, before, dilation, groups, needed)
        return CONVOLUTION_BACKWARD(*args)
    x, counts = _summed(x), grad.shape[2:]
    windows = (weight, stride, before, counts, dilation)
    cut, axis = [*x.placements], cp_axis.axis
    at = grad.placements[axis] if isinstance(grad, DTensor) else None
    if cut[axis].is_replicate() and type(at) is Shard and at.dim != 1:
        cut[axis] = at  # rows of images, or images, that every rank has
        rows = _placed(x, cut) if _is_cut(cp_axis, grad, at.dim) else x
        x = rows if at.dim == 0 or _spans(cp_axis, rows, *windows) else x
    spans = _spans(cp_axis, x, *windows)
    if spans is None:
        x = _whole_groups(_whole_positions(x), weight, groups)
    local, g = x._local_tensor, _placed_as(grad, x)._local_tensor
    own, groups = _groups(x, weight, groups)
    if spans is not None:
        before = _with(before, spans.dim - 2, 0)
        local, g = spans.of(local), _longer(g, spans.dim, spans.own)
    w = _whole(weight)[own]
    with _sharing(x):
        of_x, *others = window_convolution_backward(
            g, local, w, stride, before, dilation, groups, needed
        )
    if spans is not None and needed[0]:
        of_x = spans.back(of_x)
    summed = _gradients(x)
    return _wrapped(
        (of_x, *others),
        (x.placements, summed, summed),
        (x.shape, weight.shape, weight.shape[:1]),
        x,
    )


def _with_mesh(x: Any, others: Sequence[Any]) -> Any:
    """Return x as every rank has it, on the mesh of other operands; x without one."""
    meshes = [y.device_mesh for y in others if isinstance(y, DTensor)]
    return x if isinstance(x, DTensor) or not meshes else replicated(x, meshes[0])


def _whole_groups(x: DTensor, weight: Any, groups: int) -> DTensor:
    """Gather channels of which ranks have no whole groups."""
    cut = Shard(1) in x.placements
    if not cut or _groups_of_rank(x, 1, groups, weight.shape[0]) is not None:
        return x
    return _placed(x, [p if p == Shard(0) else Replicate() for p in x.placements])


def _groups(x: DTensor, weight: Any, groups: int) -> tuple[slice, int]:
    """Return the channels of results that this rank makes, and its groups of them."""
    first, count = 0, groups
    if Shard(1) in x.placements:
        own = _groups_of_rank(x, 1, groups, weight.shape[0])
        assert own is not None, "channels are gathered, or whole groups"
        first, count = own
    each = weight.shape[0] // groups
    return slice(first * each, (first + count) * each), count


def _groups_of_rank(
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


def _transposed(cp_axis: MeshAxis, x: Any, weight: Any, bias: Any, *how: Any) -> Any:
    call = aten.convolution.default
    dim = _cut_dim(cp_axis, x) if how[3] else None
    if dim is None or Shard(1) in x.placements:
        return call(x, weight, bias, *how)
    spans, here, sizes = _spread(cp_axis, x, weight, dim, how)
    local = _longer(x._local_tensor, dim, spans.own)
    with _sharing(x):
        out = call(local, _whole(weight), None, *here)
    out = spans.back(out)
    if bias is not None:
        out = out + _whole(bias).view(-1, *[1] * (x.ndim - 2))
    return dtensor_of(out, x.device_mesh, x.placements, sizes)


def _transposed_backward(
    cp_axis: MeshAxis, grad: Any, x: Any, weight: Any, bias_sizes: Any, *how: Any
) -> Any:
    call = aten.convolution_backward.default
    *numbers, needed = how
    dim = _cut_dim(cp_axis, x) if how[3] else None
    if dim is None or Shard(1) in x.placements:
        return call(grad, x, weight, bias_sizes, *how)
    spans, here, sizes = _spread(cp_axis, x, weight, dim, numbers)
    g = _placed_as(grad, x)._local_tensor
    local = _longer(x._local_tensor, dim, spans.own)
    args = (spans.of(g), local, _whole(weight), None, *here)
    with _sharing(x):
        of_x, of_weight, _ = call(*args, [*needed[:2], False])
    of_bias = g.sum([0, *range(2, g.ndim)]) if needed[2] else None
    if needed[0]:
        of_x = of_x.narrow(dim, 0, x._local_tensor.shape[dim])
    summed = _gradients(x)
    return _wrapped(
        (of_x, of_weight, of_bias),
        (x.placements, summed, summed),
        (x.shape, weight.shape, sizes[1:2]),
        x,
    )


def _spread(
    cp_axis: MeshAxis, x: DTensor, weight: Any, dim: int, how: Sequence[Any]
) -> tuple[_Spans, list[Any], list[int]]:
    """Return where a rank's tokens give results, how they do, and the results' sizes.

    how: stride, padding, dilation, transposed, output padding, groups.

    Raises: RewriteError where a rank would give as many as there are.
    """
    stride, padding, dilation, transposed, added, groups = how
    reach = [
        apart * (taps - 1) + 1
        for apart, taps in zip(dilation, weight.shape[2:], strict=True)
    ]
    sizes = [x.shape[0], weight.shape[1] * groups]
    for n, step, cut, size, more in zip(
        x.shape[2:], stride, padding, reach, added, strict=True
    ):
        sizes.append((n - 1) * step - 2 * cut + size + more)
    i, n = dim - 2, x.shape[dim]
    spans = _Spans(cp_axis, dim, sizes[dim], n, stride[i], reach[i], padding[i])
    if not spans.is_worth_it or are_few(sizes[dim], cp_axis.size):
        raise RewriteError("a rank's tokens would give all results")
    cut, more = _with(padding, i, 0), _with(added, i, 0)
    return spans, [stride, cut, dilation, transposed, more, groups], sizes


def _unfold(cp_axis: MeshAxis, x: Any, dim: int, size: int, step: int) -> Any:
    spans = _unfolded(cp_axis, x, dim, size, step)
    if spans is None:
        return aten.unfold.default(x, dim, size, step)
    local = spans.of(x._local_tensor).unfold(spans.dim, size, step)
    local = local.narrow(spans.dim, 0, spans.kept(spans.windows))
    shape = [*_with(x.shape, spans.dim, spans.windows), size]
    return dtensor_of(local.contiguous(), x.device_mesh, x.placements, shape)


def _unfold_backward(
    cp_axis: MeshAxis, grad: Any, sizes: Ints, dim: int, size: int, step: int
) -> Any:
    spans = _unfolded(cp_axis, grad, dim, size, step, sizes)
    if spans is None:
        return aten.unfold_backward.default(grad, sizes, dim, size, step)
    local = _longer(grad._local_tensor, spans.dim, spans.own)
    own = _with(local.shape[:-1], spans.dim, (spans.own - 1) * step + size)
    local = aten.unfold_backward.default(local, own, spans.dim, size, step)
    return dtensor_of(spans.back(local), grad.device_mesh, grad.placements, sizes)


def _unfolded(
    cp_axis: MeshAxis,
    x: Any,
    dim: int,
    size: int,
    step: int,
    sizes: Ints | None = None,
) -> _Spans | None:
    """Return the windows of tokens; None if x has none of its own. sizes: of tokens."""
    if not isinstance(x, DTensor):
        return None
    shape = x.shape if sizes is None else sizes
    dim %= len(shape)
    if not _is_cut(cp_axis, x, dim):
        return None
    windows = (shape[dim] - size) // step + 1
    spans = _Spans(cp_axis, dim, shape[dim], windows, step, size, 0)
    return spans if spans.is_worth_it else None


def _mean_pool(cp_axis: MeshAxis, x: Any, *how: Any) -> Any:
    pool = _Pool.of(cp_axis, x, aten.avg_pool2d.default, how)
    if pool is None:
        return _of_rows(aten.avg_pool2d.default, x, x, *how)
    with _sharing(x):
        out = aten.avg_pool2d.default(pool.spans.of(x._local_tensor), *pool.how)
    return pool.kept(out)


def _mean_pool_backward(cp_axis: MeshAxis, grad: Any, x: Any, *how: Any) -> Any:
    pool = _Pool.of(cp_axis, x, aten.avg_pool2d.default, how)
    if pool is None:
        return _of_rows(aten.avg_pool2d_backward.default, x, grad, x, *how)
    wide = x._local_tensor.new_empty(
        _with(x._local_tensor.shape, pool.spans.dim, pool.spans.length)
    )
    g = pool.gradient(grad)
    with _sharing(x):
        of_x = aten.avg_pool2d_backward.default(g, wide, *pool.how)
    return pool.back(of_x)


def _max_pool(cp_axis: MeshAxis, x: Any, *how: Any) -> Any:
    call = aten.max_pool2d_with_indices.default
    pool = _Pool.of(cp_axis, x, call, how)
    if pool is None:
        return _of_rows(call, x, x, *how)
    with _sharing(x):
        out, places = call(pool.spans.of(x._local_tensor, -math.inf), *pool.how)
    return pool.kept(out), pool.kept(pool.in_whole(places))


def _max_pool_backward(cp_axis: MeshAxis, grad: Any, x: Any, *how: Any) -> Any:
    *numbers, places = how
    call = aten.max_pool2d_with_indices.default
    pool = _Pool.of(cp_axis, x, call, numbers)
    if pool is None:
        call = aten.max_pool2d_with_indices_backward.default
        return _of_rows(call, x, grad, x, *how)
    wide, g = pool.spans.of(x._local_tensor, -math.inf), pool.gradient(grad)
    with _sharing(x):
        _, places = call(wide, *pool.how)  # those of the forward, as a rank has them
        of_x = aten.max_pool2d_with_indices_backward.default(g, wide, *pool.how, places)
    return pool.back(of_x)


def _of_rows(call: Any, x: Any, *args: Any) -> Any:
    """Pool the rows and channels that a rank has; x: the operand among `args`."""
    if not isinstance(x, DTensor) or not all(
        p.is_replicate() or (type(p) is Shard and p.dim < x.ndim - 2)
        for p in x.placements
    ):
        return call(*args)
    own = [_placed_as(y, x)._local_tensor if isinstance(y, Tensor) else y for y in args]
    with _sharing(x):
        results = call(*own)
    whole = [
        dtensor_of(
            y.contiguous(), x.device_mesh, x.placements, (*x.shape[:-2], *y.shape[-2:])
        )
        for y in pytree.tree_leaves(results)
    ]
    return whole if isinstance(results, tuple) else whole[0]


@dataclass(frozen=True)
class _Pool:
    """Pooling of a rank's tokens. how: arguments after its operand, on its spans."""

    x: DTensor
    spans: _Spans
    how: tuple[Any, ...]

    @classmethod
    def of(
        cls, cp_axis: MeshAxis, x: Any, call: Any, how: Sequence[Any]
    ) -> _Pool | None:
        """Return that; None if x has no tokens of its own, or its ends differ."""
        dim = _cut_dim(cp_axis, x)
        if dim is None or dim < x.ndim - 2:
            return None
        default = call._schema.arguments[1 + len(how) :]
        names = [a.name for a in call._schema.arguments[1:]]
        values = [*how, *(a.default_value for a in default)]
        given = dict(zip(names, values, strict=True))
        i = dim - x.ndim + 2
        size, step, cut, apart = (
            list(given.get(name) or other)
            for name, other in (
                ("kernel_size", ()),
                ("stride", given["kernel_size"]),
                ("padding", (0, 0)),
                ("dilation", (1, 1)),
            )
        )
        ends_alike = given.get("count_include_pad", True) or not any(cut)
        if len({*map(len, (size, step, cut, apart))}) > 1 or given["ceil_mode"]:
            return None
        if not ends_alike:
            return None
        reach = apart[i] * (size[i] - 1) + 1
        windows = (x.shape[dim] + 2 * cut[i] - reach) // step[i] + 1
        spans = _Spans(cp_axis, dim, x.shape[dim], windows, step[i], reach, cut[i])
        given |= {"stride": step, "padding": _with(cut, i, 0)}
        return cls(x, spans, tuple(given.values())) if spans.is_worth_it else None

    def kept(self, out: Tensor) -> DTensor:
        """Return the results of all ranks; out: this rank's, and more at the end."""
        spans = self.spans
        own = out.narrow(spans.dim, 0, spans.kept(spans.windows)).contiguous()
        shape = _with(out.shape, spans.dim, spans.windows)
        return dtensor_of(own, self.x.device_mesh, self.x.placements, shape)

    def gradient(self, grad: Any) -> Tensor:
        """Return the gradient of this rank's results, with zeros for those beyond."""
        local = _placed_as(grad, self.x)._local_tensor
        return _longer(local, self.spans.dim, self.spans.own)

    def back(self, spans: Tensor) -> DTensor:
        """Return the gradient of x."""
        local, x = self.spans.back(spans), self.x
        return dtensor_of(local, x.device_mesh, x.placements, x.shape)

    def in_whole(self, places: Tensor) -> Tensor:
        """Return places in rows of columns of x, of those in this rank's spans."""
        spans, width = self.spans, self.x.shape[-1]
        first = spans.rank * spans.own * spans.step - spans.before
        if spans.dim == self.x.ndim - 2:
            return places + first * width
        rows = places.div(spans.length, rounding_mode="floor")
        return places - rows * spans.length + first + rows * width


def _spans(
    cp_axis: MeshAxis,
    x: DTensor,
    weight: Any,
    stride: Ints,
    before: Ints,
    counts: Ints,
    dilation: Ints,
) -> _Spans | None:
    """Return the windows of a convolution; None if ranks do not share out positions."""
    if (dim := _cut_dim(cp_axis, x)) is None:
        return None
    i = dim - 2
    size = dilation[i] * (weight.shape[dim] - 1) + 1
    spans = _Spans(*(cp_axis, dim, x.shape[dim], counts[i], stride[i], size, before[i]))
    return spans if spans.is_worth_it else None


def _cut_dim(cp_axis: MeshAxis, x: Any) -> int | None:
    """Return the dimension of positions that the axis cuts, and no other does."""
    at = x.placements[cp_axis.axis] if isinstance(x, DTensor) else None
    dim = at.dim if type(at) is Shard else 0
    return dim if dim > 1 and _is_cut(cp_axis, x, dim) else None


def _is_cut(cp_axis: MeshAxis, x: DTensor, dim: int) -> bool:
    cut = [axis for axis, p in enumerate(x.placements) if p == Shard(dim)]
    return cut == [cp_axis.axis]


def _whole_positions(x: DTensor) -> DTensor:
    """Gather what is cut elsewhere than along rows of a batch and channels."""
    kept = (Shard(0), Shard(1))
    return _placed(x, [p if p in kept else Replicate() for p in x.placements])


def _summed(x: DTensor) -> DTensor:
    return _placed(x, [Replicate() if p.is_partial() else p for p in x.placements])


def _placed_as(x: Any, like: DTensor) -> DTensor:
    if not isinstance(x, DTensor):
        everywhere = [Replicate()] * like.device_mesh.ndim
        x = DTensor.from_local(x, like.device_mesh, everywhere, run_check=False)
    return _placed(x, like.placements)


def _placed(x: DTensor, placements: Sequence[Placement]) -> DTensor:
    return x.redistribute(placements=placements)


def _whole(x: Any) -> Tensor:
    """Return a weight, of which every rank has all."""
    if isinstance(x, DTensor):
        x = _placed(x, [Replicate()] * x.device_mesh.ndim)._local_tensor
    return x  # type: ignore[no-any-return]


def _sharing(x: DTensor) -> AbstractContextManager[None]:
    """Mark what is traced inside as work on this rank's part of x."""
    sizes = x.numel(), x._local_tensor.numel()
    return sharing_rows(x.device_mesh, x.placements, *sizes)


def _gradients(x: DTensor) -> list[Placement]:
    """Return where gradients of a weight lie: ranks have those of their tokens."""
    return [
        Shard(0) if p == Shard(1) else Replicate() if p.is_replicate() else Partial()
        for p in x.placements
    ]


def _wrapped(
    locals_: Sequence[Any],
    placements: Sequence[Sequence[Placement]],
    sizes: Sequence[Ints],
    like: DTensor,
) -> list[Any]:
    """Return local tensors as DTensors; those that are None or empty as they are."""
    return [
        x
        if x is None or not x.numel()
        else dtensor_of(x.contiguous(), like.device_mesh, where, size)
        for x, where, size in zip(locals_, placements, sizes, strict=True)
    ]


def _longer(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x with zeros at its end, or less of it."""
    missing = size - x.shape[dim]
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing]) if missing else x


def _with(numbers: Ints, i: int, number: int) -> list[int]:
    return [*numbers[:i], number, *numbers[i + 1 :]]
