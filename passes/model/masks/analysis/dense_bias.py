"""Write the part of a mask that has to be computed for pairs of queries and keys.

    bias = aten.where(aten.le(columns, rows), ...)

A bias is computed by the functional calls of its program, in which values of queries
enter as rows. Attention reads the rows of a rank's queries, and what is large is cut
before it is made (joint/tiling/sink_slices), so that no rank holds all pairs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_symbol

from ....graph.nodes import fake_value
from .cases import Cases, is_pointwise
from .formula import (
    SIGNS,
    And,
    Compare,
    Dense,
    Formula,
    Not,
    Only,
    Or,
)
from .mask_program import Unreadable
from .mask_writer import MaskWriter
from .vectors import Vector, require_small
from .views import (
    COPIES,
    MEANINGS,
    NONE,
    PARTS,
    MaskAxis,
    View,
    operand,
    rearranged,
)

aten = torch.ops.aten


# Given a call, a dimension of its result, and the number of the result if there are
# several: the operands that have the same rows, each with its dimension of them. Empty
# if the call is not row by row.
RowsOf = Callable[[fx.Node, int, int | None], dict[fx.Node, int]]


class DenseBiasWriter:
    """Writer of values that are computed for pairs.

    rows_of: if given, calls that it proves to be row by row are written, too.
    """

    def __init__(
        self, writer: MaskWriter, tokens: int, rows_of: RowsOf | None = None
    ) -> None:
        self.writer, self.call = writer, writer.call
        self.tokens, self.rows_of = tokens, rows_of
        self._pairs: dict[Hashable, fx.Node] = {}

    def formula(self, formula: Formula) -> fx.Node:
        """Write a formula as a bool node [B or 1, H or 1, Sq or 1, Sk or 1]."""
        if isinstance(formula, Only):
            return self._row(formula.vector)
        if isinstance(formula, Compare):
            pair = (self._row(formula.rows), self._row(formula.columns))
            return self.call(SIGNS[formula.sign], *pair)
        if isinstance(formula, Dense):
            return self.writer.normal(self.pairs(formula.view), formula.view, cut=True)
        if isinstance(formula, Not):
            return self.call(aten.logical_not.default, self.formula(formula.part))
        target = aten.logical_or if isinstance(formula, Or) else aten.logical_and
        parts = [self.formula(part) for part in formula.parts]
        if not parts:
            return self.writer.constant(
                torch.full((1, 1, 1, 1), isinstance(formula, And))
            )
        result = parts[0]
        for part in parts[1:]:
            result = self.call(target.default, result, part)
        return result

    def _row(self, vector: Vector) -> fx.Node:
        return self.writer.vector(vector)

    def cases(self, cases: Cases, dtype: torch.dtype) -> fx.Node:
        """Write numbers that formulas choose among."""
        *numbers, last = (self._number(case.number, dtype) for case in cases)
        for case, number in zip(cases, numbers, strict=False):
            last = self.call(aten.where.self, self.formula(case.where), number, last)
        return last

    def _number(self, number: Any, dtype: torch.dtype) -> fx.Node:
        if not isinstance(number, Vector):
            raise Unreadable("sums of a query and a key")
        node = self._row(number)
        assert node.meta["example_value"].dtype == dtype, "cases have the mask's dtype"
        return node

    def whole_pairs(
        self, bias: fx.Node, queries: int, keys: int, like: Tensor
    ) -> fx.Node:
        """Expand a bias to [B or 1, H or 1, Sq, Sk].

        It keeps a gradient only if the mask, `like`, has one.
        """
        while bias.meta["example_value"].ndim < len(MEANINGS):
            bias = self.call(aten.unsqueeze.default, bias, 0)
        shape = bias.meta["example_value"].shape
        if tuple(shape[2:]) != (queries, keys):
            sizes = [*map(int, shape[:2]), queries, keys]
            bias = self.call(aten.expand.default, bias, sizes)
        return self.with_gradient_of(bias, like)

    def with_gradient_of(self, bias: fx.Node, like: Tensor) -> fx.Node:
        """Detach a bias if the mask, `like`, has no gradient."""
        if bias.meta["example_value"].requires_grad and not like.requires_grad:
            bias = self.call(aten.detach.default, bias)
        return bias

    def pairs(self, view: View) -> fx.Node:
        """Write the value of a view in the dimensions of its node.

        A dimension that is cut has only the positions that count.

        Raises: Unreadable, if it cannot be computed row by row.
        """
        if view.key not in self._pairs:
            self._pairs[view.key] = self._new_pairs(view)
        return self._pairs[view.key]

    def _new_pairs(self, view: View) -> fx.Node:
        node = view.node
        if node.op in ("placeholder", "get_attr"):
            return self._rows_of(view)
        if not view.is_pairwise and not self._is_split(view):
            return self._rows_of(view)
        original = rearranged(view)
        if original is not None and (view.is_cut or original.is_cut):
            if _is_input(node):
                return self._rows_of(view)
            return self.arranged(self.pairs(original), original, view)
        filled = view
        while (source := rearranged(filled)) is not None:
            filled = source
        if filled.node.target is aten.full.default:
            sizes = [1 if a.meaning in ("", *"BHQ") else n for a, n in _sizes(view)]
            args = sizes, filled.node.args[1]
            return self.call(aten.full.default, *args, **filled.node.kwargs)
        try:
            operands_of(view, original)
        except Unreadable as problem:
            return self._row_parallel(view, problem)
        own = _own_dims(node)
        whole = [  # they are cut afterwards
            MaskAxis(axis.meaning) if dim in own else axis
            for dim, axis in enumerate(view.axes)
        ]
        operands = operands_of(View(node, tuple(whole)), original)
        replacements = {n: self.pairs(v) for n, v in operands.items()}
        result = self.writer.copy_call(node, replacements)
        return self._cut(result, {d: view.axes[d] for d in own})

    def _is_split(self, view: View) -> bool:
        """Tell whether a value of queries alone is too large to be on every rank."""
        if self.rows_of is None or "Q" not in view.meanings or _is_input(view.node):
            return False
        try:
            require_small(view.node, self.tokens)
        except Unreadable:
            return True
        return False

    def _row_parallel(self, view: View, problem: Unreadable) -> fx.Node:
        """Write a call that treats rows of queries alike, whatever else it mixes."""
        dims = [d for d, axis in enumerate(view.axes) if axis.meaning == "Q"]
        if self.rows_of is None or len(dims) != 1 or view.axes[dims[0]].is_cut:
            raise problem
        (dim,), call = dims, view.node
        number: int | None = None
        if call.target is operator.getitem:
            several, part = call.args
            assert isinstance(several, fx.Node) and isinstance(part, int)
            call, number = several, part
        row_dims = self.rows_of(call, dim, number)
        if not row_dims:
            raise problem
        replacements = {}
        for source in call.all_input_nodes:
            axes = _named(source, row_dims.get(source))
            replacements[source] = self._filled(View(source, axes))
        result = self.writer.copy_call(call, replacements)
        if number is not None:
            result = self.call(operator.getitem, result, number)
        other_axes = {d: a for d, a in enumerate(view.axes) if d != dim}
        return self._cut(result, other_axes)

    def _filled(self, view: View) -> fx.Node:
        """Write the value of a view, expanded to all positions of its dimensions."""
        value = self.pairs(view)
        shape = list(map(int, view.value.shape))
        if list(fake_value(value).shape) == shape:
            return value
        return self.call(aten.expand.default, value, shape)

    def arranged(self, value: fx.Node, original: View, view: View) -> fx.Node:
        """Bring a value of `original` to the dimensions of `view`; both may be cut."""
        # A symbol is the only one: torch finds it out.
        sizes = [-1 if is_symbol(n) else int(n) for n in fake_value(value).shape]
        place = {axis.meaning: d for d, axis in enumerate(original.axes)}
        named = [
            place[a.meaning] for a in view.axes if a.meaning and a.meaning in place
        ]
        rest = [d for d in range(len(sizes)) if d not in named]
        value = self.call(aten.permute.default, value, rest + named)
        shape = [
            sizes[place[a.meaning]] if a.meaning in place else 1 for a in view.axes
        ]
        return self.call(aten.reshape.default, value, shape)

    def _cut(self, node: fx.Node, axes: dict[int, MaskAxis]) -> fx.Node:
        """Keep the positions of dimensions that count, as a view where possible."""
        for dim, axis in axes.items():
            if axis.positions is None:
                continue
            positions = axis.positions.tolist()
            first = positions[0] if positions else 0
            step = positions[1] - first if len(positions) > 1 else 1
            end = first + step * len(positions)
            if step > 0 and positions == list(range(first, end, step)):
                node = self.call(aten.slice.Tensor, node, dim, first, end, step)
            else:
                at = self.writer.constant(axis.positions)
                node = self.call(aten.index_select.default, node, dim, at)
        return node

    def _rows_of(self, view: View) -> fx.Node:
        """Write a value that exists before pairs are made of it."""
        if _is_input(view.node) and self.rows_of is not None:
            pass  # which is there
        elif not view.is_pairwise:
            require_small(view.node, self.tokens)
        elif not _is_input(view.node):
            shape = list(view.value.shape)
            raise Unreadable(f"{view.node.name} {shape} is computed")
        return self._cut(self.writer.copy(view.node), dict(enumerate(view.axes)))


def _sizes(view: View) -> Iterator[tuple[MaskAxis, int]]:
    """Yield the axes of a view, each with the number of its positions that count."""
    for axis, size in zip(view.axes, view.value.shape, strict=True):
        yield axis, size if axis.positions is None else len(axis.positions)


def _own_dims(node: fx.Node) -> tuple[int, ...]:
    """Return the dimensions that a look-up adds, and that no operand has."""
    dims = node.meta["val"].ndim
    if node.target is aten.embedding.default:
        return (dims - 1,)
    if node.target is aten.index.Tensor:
        table, indices = node.args[:2]
        after = table.meta["val"].ndim - len(indices)  # type: ignore[union-attr,arg-type]
        return tuple(range(dims - after, dims))
    if node.target is aten.index_select.default:
        return (node.args[1] % dims,)
    return ()


def operands_of(view: View, original: View | None) -> dict[fx.Node, View]:
    """Return the views of all operands of a call that works pair by pair.

    Raises: Unreadable, for any other call.
    """
    node = view.node
    if original is not None:
        return {original.node: original}
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


def _named(node: fx.Node, rows: int | None) -> tuple[MaskAxis, ...]:
    """Name the dimensions of a node, whole; dimension `rows` is that of the queries."""
    sizes = enumerate(node.meta["val"].shape)
    return tuple(
        NONE if n == 1 else MaskAxis("Q" if d == rows else f"{node.name} {d}")
        for d, n in sizes
    )


def _plain(node: fx.Node) -> tuple[MaskAxis, ...]:
    return (NONE,) * int(node.meta["val"].ndim)


def _is_input(node: fx.Node) -> bool:
    """Tell whether a value is an input or a part of one, so that its pairs exist."""
    while node.op not in ("placeholder", "get_attr"):
        if node.target not in _PARTS or len(node.all_input_nodes) != 1:
            return False
        (node,) = node.all_input_nodes
    return True


_PARTS = (*PARTS, *COPIES, aten._to_copy.default)
