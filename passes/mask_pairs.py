"""Writes the part of a mask that has to be worked out for pairs of queries and keys.

    bias = aten.where(aten.le(columns, rows), ...)

A bias is computed by the functional calls of its program. What they know of queries
enters as rows; those are noted, so that shard_graph shards them, and no rank ever holds
all pairs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.passes.mask_cases import Cases, is_pointwise
from cpcompile.passes.mask_formula import (
    SIGNS,
    And,
    Compare,
    Dense,
    Formula,
    Not,
    Only,
    Or,
)
from cpcompile.passes.mask_program import Unreadable
from cpcompile.passes.mask_vectors import Vector, require_small
from cpcompile.passes.mask_views import (
    COPIES,
    MEANINGS,
    NONE,
    PARTS,
    Axis,
    View,
    operand,
    rearranged,
)
from cpcompile.passes.mask_writer import MaskWriter

aten = torch.ops.aten


class PairWriter:
    """Inserts what is computed for pairs.

    rows: the nodes that are to be sharded, and their dimension of queries.
    """

    def __init__(self, writer: MaskWriter, tokens: int) -> None:
        self.writer, self.call = writer, writer.call
        self.tokens = tokens
        self.rows: dict[fx.Node, int] = {}
        self._pairs: dict[Hashable, fx.Node] = {}

    def formula(self, formula: Formula) -> fx.Node:
        """A bool node, [B or 1, H or 1, Sq or 1, Sk or 1]."""
        if isinstance(formula, Only):
            return self._row(formula.vector)
        if isinstance(formula, Compare):
            pair = (self._row(formula.rows), self._row(formula.columns))
            return self.call(SIGNS[formula.sign], *pair)
        if isinstance(formula, Dense):
            return self.writer.normal(self.pairs(formula.view), formula.view)
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
        node = self.writer.vector(vector)
        if vector.is_rows:
            self.rows[node] = MEANINGS.index("Q")
        return node

    def cases(self, cases: Cases, dtype: torch.dtype) -> fx.Node:
        """Numbers that formulas choose among."""
        *others, last = (self._number(case.number, dtype) for case in cases)
        for case, number in zip(cases, others, strict=False):
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
        """A bias as [B or 1, H or 1, Sq, Sk]; with a gradient if the mask has one."""
        while bias.meta["example_value"].ndim < len(MEANINGS):
            bias = self.call(aten.unsqueeze.default, bias, 0)
        shape = bias.meta["example_value"].shape
        if tuple(shape[2:]) != (queries, keys):
            sizes = [*map(int, shape[:2]), queries, keys]
            bias = self.call(aten.expand.default, bias, sizes)
            if not self.rows and queries > 1:
                self.rows[bias] = MEANINGS.index("Q")
        if bias.meta["example_value"].requires_grad and not like.requires_grad:
            bias = self.call(aten.detach.default, bias)
        return bias

    def pairs(self, view: View) -> fx.Node:
        """The value of a pairwise view, in the dimensions of its node.

        Raises: Unreadable, if it cannot be computed row by row.
        """
        if view.key not in self._pairs:
            self._pairs[view.key] = self._new_pairs(view)
        return self._pairs[view.key]

    def _new_pairs(self, view: View) -> fx.Node:
        node = view.node
        if not view.is_pairwise or node.op in ("placeholder", "get_attr"):
            return self._rows_of(view)
        behind = rearranged(view)
        if behind is not None and any(
            a.meaning == "Q" and a.positions is not None for a in behind.axes
        ):
            return self._rows_of(view)  # cut from more rows
        filled = view
        while (source := rearranged(filled)) is not None:
            filled = source
        if filled.node.target is aten.full.default:
            pairs = zip(view.axes, view.value.shape, strict=True)
            sizes = [n if axis.meaning == "K" else 1 for axis, n in pairs]
            args = sizes, filled.node.args[1]
            return self.call(aten.full.default, *args, **filled.node.kwargs)
        operands = _operands(view, behind)
        known = {n: self.pairs(v) for n, v in operands.items()}
        return self.writer.copy_call(node, known)

    def _rows_of(self, view: View) -> fx.Node:
        """A value that is there before pairs are made of it."""
        if view.is_pairwise:
            _require_input(view.node)
        else:
            require_small(view.node, self.tokens)
        node = self.writer.copy(view.node)
        dims = [d for d, a in enumerate(view.axes) if a.meaning == "Q"]
        if dims:
            (dim,) = dims
            if view.axes[dim].positions is not None:
                raise Unreadable(f"{view.node.name} has other rows than the queries")
            if node.op in ("placeholder", "get_attr"):
                node = self.call(aten.alias.default, node)
            self.rows[node] = dim
        return node


def _operands(view: View, behind: View | None) -> dict[fx.Node, View]:
    """The views of all operands of a call that works pair by pair."""
    node = view.node
    if behind is not None:
        return {behind.node: behind}
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
                found = {i: operand(looked_up, i) for i in picked}
                return found | {table: View(table, _plain(table))}
    if node.target is aten.index_select.default:
        source, dim, _ = node.args
        if view.axes[dim].meaning != "Q":  # type: ignore[index]
            return {source: View(source, view.axes)}  # type: ignore[dict-item,arg-type]
    raise Unreadable(f"{node.name} ({node.target}) is computed of all pairs at once")


def _plain(node: fx.Node) -> tuple[Axis, ...]:
    return (NONE,) * int(node.meta["val"].ndim)


def _require_input(node: fx.Node) -> None:
    """Pairs may only be there before if they are an input, or a part of one."""
    while node.op not in ("placeholder", "get_attr"):
        if node.target not in _PARTS or len(node.all_input_nodes) != 1:
            raise Unreadable(f"{node.name} {list(node.meta['val'].shape)} is computed")
        (node,) = node.all_input_nodes


_PARTS = (*PARTS, *COPIES, aten._to_copy.default)
