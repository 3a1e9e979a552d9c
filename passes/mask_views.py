"""What the dimensions of a value mean to a mask: batch, heads, queries or keys.

    le [1, 1, 16, 16]: B H Q K   <- le(unsqueeze [16, 1], arange [16])
    unsqueeze [16, 1]: Q 1       <- arange [16]: Q

Meanings are handed from a result to what it is computed from, never guessed by size. A
dimension of size 1 has none: nothing varies along it. Where a value is cut, its
dimension carries the positions that are left, so that a mask of S + 1 keys of which S
are used is read as what it is.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.passes.mask_program import Unreadable

aten = torch.ops.aten
MEANINGS = "BHQK"


@dataclass(frozen=True, eq=False)
class Axis:
    """One dimension: its meaning, "" for none, and which positions of it count.

    positions: int64, one per position of the meaning, or one in all; None: all, in
        order.
    """

    meaning: str = ""
    positions: Tensor | None = None

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal axes."""
        at = self.positions
        return (self.meaning, None if at is None else at.numpy().tobytes())


NONE = Axis()


@dataclass(frozen=True, eq=False)
class View:
    """A value of the functional program, and what its dimensions mean."""

    node: fx.Node
    axes: tuple[Axis, ...]

    @property
    def key(self) -> Hashable:
        """Equal for equal views."""
        return (self.node, tuple(a.key for a in self.axes))

    @property
    def meanings(self) -> set[str]:
        """The meanings along which the value may vary."""
        return {axis.meaning for axis in self.axes} - {""}

    @property
    def is_pairwise(self) -> bool:
        """Whether it may vary along the queries and along the keys."""
        return {"Q", "K"} <= self.meanings

    @property
    def value(self) -> Tensor:
        """The fake value of the node."""
        return self.node.meta["val"]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the node."""
        return self.value.dtype


def root_view(node: fx.Node, meanings: str) -> View:
    """The mask itself, whose last dimensions have these meanings."""
    shape = node.meta["val"].shape
    if len(shape) > len(meanings):
        raise Unreadable(f"a mask of shape {list(shape)}")
    named = meanings[len(meanings) - len(shape) :]
    axes = (Axis(m) if n > 1 else NONE for m, n in zip(named, shape, strict=True))
    return View(node, tuple(axes))


def operand(view: View, node: fx.Node) -> View:
    """An operand of a pointwise call: its dimensions are aligned from the right."""
    shape = node.meta["val"].shape
    axes = view.axes[len(view.axes) - len(shape) :]
    pairs = zip(axes, shape, strict=True)
    return View(node, tuple(axis if n > 1 else NONE for axis, n in pairs))


def look_through(view: View) -> View:
    """Walk back over calls that only rearrange, as long as the value is pairwise."""
    while view.is_pairwise:
        behind = rearranged(view)
        if behind is None:
            return view
        view = behind
    return view


def rearranged(view: View) -> View | None:
    """What a call that only rearranges is given; None if it is another call."""
    rule = _RULES.get(view.node.target)
    if rule is None:
        return None
    source = view.node.args[0]
    assert isinstance(source, fx.Node), "views have a tensor as first argument"
    axes = rule(view, source.meta["val"], *view.node.args[1:], **view.node.kwargs)
    if axes is None:
        return None
    return View(source, tuple(axes))


def _same(view: View, source: Tensor, *_: Any, **__: Any) -> Any:
    return view.axes


def _unsqueeze(view: View, source: Tensor, dim: int) -> Any:
    dim %= len(view.axes)
    return view.axes[:dim] + view.axes[dim + 1 :]


def _squeeze(view: View, source: Tensor, dim: Any = None) -> Any:
    dims = range(source.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % source.ndim for d in dims if source.shape[d] == 1}
    left = iter(view.axes)
    return tuple(NONE if d in gone else next(left) for d in range(source.ndim))


def _expand(view: View, source: Tensor, sizes: Any, **_: Any) -> Any:
    axes = view.axes[len(view.axes) - source.ndim :]
    return tuple(
        axis if n > 1 else NONE for axis, n in zip(axes, source.shape, strict=True)
    )


def _permute(view: View, source: Tensor, dims: Any) -> Any:
    order = [d % source.ndim for d in dims]
    return tuple(view.axes[order.index(d)] for d in range(source.ndim))


def _transpose(view: View, source: Tensor, a: int = 0, b: int = 1) -> Any:
    axes = list(view.axes)
    if source.ndim > 1:
        axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def _reshape(view: View, source: Tensor, sizes: Any) -> Any:
    """Only dimensions of size 1 may come and go, or those without a meaning."""
    new = tuple(view.value.shape)
    result = [NONE] * source.ndim
    i = j = 0
    while i < source.ndim and j < len(new):
        if source.shape[i] == new[j]:
            result[i] = view.axes[j]
            i, j = i + 1, j + 1
        elif source.shape[i] == 1:
            i += 1
        elif new[j] == 1:
            j += 1
        else:
            return None
    rest = (*source.shape[i:], *new[j:])
    return tuple(result) if math.prod(rest) == 1 else None


def _slice(
    view: View,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    dim %= source.ndim
    first, _, _ = slice(start, end, step).indices(source.shape[dim])
    count = view.value.shape[dim]
    kept = torch.arange(count) * step + first
    return _at(view.axes, dim, kept, source.shape[dim])


def _select(view: View, source: Tensor, dim: int, index: int) -> Any:
    dim %= source.ndim
    axes = (*view.axes[:dim], NONE, *view.axes[dim:])
    if source.shape[dim] == 1:
        return axes
    position = torch.tensor([index % source.shape[dim]])
    return (*axes[:dim], Axis("", position), *axes[dim + 1 :])


def _flip(view: View, source: Tensor, dims: Any) -> Any:
    axes = view.axes
    for d in dims:
        n = source.shape[d]
        axes = _at(axes, d % source.ndim, torch.arange(n - 1, -1, -1), n)
    return axes


def _at(axes: tuple[Axis, ...], dim: int, kept: Tensor, size: int) -> tuple[Axis, ...]:
    """The dimension before `kept` of its `size` positions were taken from it."""
    axis = axes[dim]
    if axis.positions is not None:
        kept = kept[axis.positions]
    elif not axis.meaning:  # of one position
        kept = kept[:1]
    if size == 1:
        new = NONE
    elif len(kept) == size and torch.equal(kept, torch.arange(size)):
        new = Axis(axis.meaning)
    else:
        new = replace(axis, positions=kept)
    return (*axes[:dim], new, *axes[dim + 1 :])


_RULES: dict[Any, Any] = {
    aten.alias.default: _same,
    aten.clone.default: _same,
    aten.detach.default: _same,
    aten.contiguous.default: _same,
    aten.lift_fresh.default: _same,
    aten.lift_fresh_copy.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.view.default: _reshape,
    aten.reshape.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.flip.default: _flip,
}
