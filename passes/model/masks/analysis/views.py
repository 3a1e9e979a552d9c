"""Meanings of the dimensions of a value to a mask: batch, heads, queries or keys.

    le [1, 1, 16, 16]: B H Q K   <- le(unsqueeze [16, 1], arange [16])
    unsqueeze [16, 1]: Q 1       <- arange [16]: Q

Meanings are handed from a result to its operands, never guessed by size. A dimension of
size 1 has none: nothing varies along it. Where a value is cut, its dimension carries
the positions that are left, so that a mask of S + 1 keys of which S are used is read as
what it is.
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

from .mask_program import Unreadable

aten = torch.ops.aten
MEANINGS = "BHQK"


@dataclass(frozen=True, eq=False)
class MaskAxis:
    """One dimension: its meaning, "" for none, and which positions of it count.

    positions: int64, one per position of the meaning, or one in all; None: all, in
        order.
    """

    meaning: str = ""
    positions: Tensor | None = None

    @cached_property
    def key(self) -> Hashable:
        """Key that is equal for equal axes."""
        at = self.positions
        return (self.meaning, None if at is None else at.numpy().tobytes())

    @property
    def is_cut(self) -> bool:
        """True if only some positions of the dimension count."""
        return self.positions is not None


NONE = MaskAxis()


@dataclass(frozen=True, eq=False)
class View:
    """A value of the functional program, with the meanings of its dimensions."""

    node: fx.Node
    axes: tuple[MaskAxis, ...]

    @property
    def key(self) -> Hashable:
        """Key that is equal for equal views."""
        return (self.node, tuple(a.key for a in self.axes))

    @property
    def meanings(self) -> set[str]:
        """Meanings along which the value may vary."""
        return {axis.meaning for axis in self.axes} - {""}

    @property
    def is_pairwise(self) -> bool:
        """True if the value may vary along both the queries and the keys."""
        return {"Q", "K"} <= self.meanings

    @property
    def is_cut(self) -> bool:
        """True if only some positions of a dimension count."""
        return any(axis.positions is not None for axis in self.axes)

    @property
    def value(self) -> Tensor:
        """Fake value of the node."""
        return self.node.meta["val"]  # type: ignore[no-any-return]

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype


def root_view(node: fx.Node, meanings: str) -> View:
    """Return the view of a mask, whose last dimensions have these meanings."""
    shape = node.meta["val"].shape
    if len(shape) > len(meanings):
        raise Unreadable(f"a mask of shape {list(shape)}")
    named = meanings[len(meanings) - len(shape) :]
    axes = (MaskAxis(m) if n > 1 else NONE for m, n in zip(named, shape, strict=True))
    return View(node, tuple(axes))


def operand(view: View, node: fx.Node) -> View:
    """Return the view of an operand of a pointwise call, aligned from the right."""
    shape = node.meta["val"].shape
    axes = view.axes[len(view.axes) - len(shape) :]
    pairs = zip(axes, shape, strict=True)
    return View(node, tuple(axis if n > 1 else NONE for axis, n in pairs))


def rearranged(view: View) -> View | None:
    """Return the operand of a call that only rearranges; None for another call.

    torch says which element goes where: the call is run on a tensor without elements,
    whose index is a number in mixed radix, and the strides of the result are read.
    """
    node = view.node
    if node.target not in COPIES and node.target not in PARTS:
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node), "views have a tensor as first argument"
    if node.target in COPIES:
        return View(source, view.axes)
    shape = tuple(source.meta["val"].shape)
    if not math.prod(shape):
        return None
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    like = torch.empty_strided(shape, strides, device="meta")
    target = aten.view.default if node.target is aten._unsafe_view.default else None
    result = (target or node.target)(like, *node.args[1:], **node.kwargs)
    unplaced = {d for d, n in enumerate(result.shape) if n > 1 and result.stride(d)}
    start, axes = result.storage_offset(), []
    for size, stride in zip(shape, strides, strict=True):
        first, start = divmod(start, stride)
        axis = MaskAxis("", torch.tensor([first])) if size > 1 else NONE
        for dim in sorted(unplaced):
            step, rest = divmod(result.stride(dim), stride)
            if not rest and first + step * (result.shape[dim] - 1) < size:
                positions = torch.arange(result.shape[dim]) * step + first
                axis = picked(view.axes[dim], positions, size)
                unplaced.remove(dim)
                break
        axes.append(axis)
    return None if unplaced else View(source, tuple(axes))  # some are split, or joined


def picked(axis: MaskAxis, taken: Tensor, size: int) -> MaskAxis:
    """Return the axis of a dimension of `size`, whose positions `taken` are `axis`."""
    if axis.positions is not None:
        taken = taken[axis.positions]
    elif not axis.meaning:  # of one position
        taken = taken[:1]
    if size == 1:
        return NONE
    in_order = len(taken) == size and torch.equal(taken, torch.arange(size))
    return replace(axis, positions=None if in_order else taken)


def is_pointwise(target: Any) -> bool:
    """Tell whether a call computes every element from one element of each operand.

    Calls with random results do not count.
    """
    return target is aten._to_copy.default or (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def operands_of(view: View) -> dict[fx.Node, View]:
    """Return the views of all operands of a call that works pair by pair.

    Raises: Unreadable, for any other call.
    """
    node = view.node
    if is_pointwise(node.target):
        return {n: operand(view, n) for n in node.all_input_nodes}
    if node.target is aten.embedding.default:
        weight, at = node.args[:2]
        assert isinstance(weight, fx.Node) and isinstance(at, fx.Node)
        return {weight: View(weight, _plain(weight)), at: View(at, view.axes[:-1])}
    if node.target is aten.index.Tensor:
        table, indices = node.args[:2]
        if isinstance(table, fx.Node) and isinstance(indices, list | tuple):
            picked = [i for i in indices if isinstance(i, fx.Node)]
            dims = table.meta["val"].ndim
            first = len(picked) == len(indices) and not any(
                i.meta["val"].dtype == torch.bool for i in picked
            )
            after = dims - len(indices)
            if first:
                axes = view.axes[: len(view.axes) - after]
                looked_up = View(node, axes)
                index_views = {i: operand(looked_up, i) for i in picked}
                return index_views | {table: View(table, _plain(table))}
    if node.target is aten.index_select.default:
        source, dim, _ = node.args
        if view.axes[dim].meaning != "Q":  # type: ignore[index]
            return {source: View(source, view.axes)}  # type: ignore[dict-item,arg-type]
    raise Unreadable(f"{node.name} ({node.target}) is computed of all pairs at once")


def _plain(node: fx.Node) -> tuple[MaskAxis, ...]:
    return (NONE,) * int(node.meta["val"].ndim)


# Calls whose result is a part of their argument, in other dimensions.
PARTS = (
    aten.expand.default, aten.permute.default, aten.reshape.default,
    aten.select.int, aten.slice.Tensor, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.view.default, aten._unsafe_view.default,
)  # fmt: skip
COPIES = (
    aten.alias.default, aten.clone.default, aten.contiguous.default,
    aten.detach.default, aten.lift_fresh.default, aten.lift_fresh_copy.default,
)  # fmt: skip
