"""Documents: equal ids of rows and columns, and positions that start again with each.

    document = cumsum(diff(position_ids) != 1)
    document[q] == document[k] & position_ids[k] <= position_ids[q]
      ->  document[q] == document[k] & k <= q

Within one such document each step of the positions is 1. So the difference of the
positions of two tokens is the difference of the tokens, whatever the positions are.

    document[q] == document[k] and attention_mask[k]
      ->  q_segment_ids, kv_segment_ids: equal where the documents are; -1 if hidden

Any integers may stand for documents. Their ranks among the values of the keys serve as
ids: they are never negative, and fit into int32. Two equalities become one equality of
pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from .formula import And, Compare, Formula, Not, Or, both, conjunction, either, negated
from .sums import calculate, compared
from .vectors import Vector, VectorReader, call, constant, positions, scalar
from .views import MaskAxis, View, operand

aten = torch.ops.aten


@dataclass(frozen=True)
class VectorSource:
    """Source of a vector: the value of a node at each token, plus a number."""

    node: fx.Node
    meanings: tuple[str, ...]  # of the node's dimensions; "S" for the tokens
    offset: int


def same_tokens(equality: Compare, vectors: VectorReader) -> VectorSource | None:
    """Return the origin if an equality compares one value at tokens q and k."""
    pair = (equality.rows, equality.columns)
    rows, columns = (origin(x, vectors) for x in pair)
    return rows if rows is not None and rows == columns else None


def within_documents(formula: Formula, vectors: VectorReader) -> Formula:
    """Compare tokens instead of positions in a document, where both are in one."""
    for part in conjunction(formula):
        if not isinstance(part, Compare) or part.sign != "==":
            continue
        document = same_tokens(part, vectors)
        if document is None:
            continue
        position = _positions_of(document, vectors)
        if position is not None:
            other_parts = [x for x in conjunction(formula) if x is not part]
            formula = both(
                part, *(_replaced(x, position, vectors) for x in other_parts)
            )
    return formula


def origin(vector: Vector, vectors: VectorReader) -> VectorSource | None:
    """Return the node that a vector takes its values from, token by token."""
    if vector.view is not None:
        return _origin(vector.view, vectors)
    if vector.target is aten._to_copy.default and vector.dtype == torch.int64:
        return origin(vector.args[0], vectors)
    return None


def _origin(view: View, vectors: VectorReader) -> VectorSource | None:
    offset = 0
    while True:
        node = view.node
        original = vectors.original(view)
        if original is not None:
            view = original
            continue
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            break
        source, number = node.args
        if not isinstance(source, fx.Node) or not isinstance(number, int):
            break
        offset += number if node.target is aten.add.Tensor else -number
        view = operand(view, source)
    if view.dtype not in (torch.int64, torch.int32):
        return None
    if any(a.positions is not None for a in view.axes):
        return None
    meanings = tuple("S" if a.meaning in ("Q", "K") else a.meaning for a in view.axes)
    return VectorSource(view.node, meanings, offset) if "S" in meanings else None


def _positions_of(document: VectorSource, vectors: VectorReader) -> VectorSource | None:
    """Return the positions of which a document number counts the steps other than 1."""
    dim = document.meanings.index("S")
    counted = _without_copies(document.node)
    if counted.target is not aten.cumsum.default or document.offset:
        return None
    if counted.args[1] % len(document.meanings) != dim:
        return None
    if counted.meta["val"].dtype != torch.int64:  # a short one would start again
        return None
    broken = _without_copies(counted.args[0])
    if broken.target is not aten.ne.Scalar or broken.args[1] != 1:
        return None
    step = broken.args[0]
    if step.target is not aten.sub.Tensor or step.kwargs:
        return None
    after, before = step.args
    joined = _part(after, dim, 1)
    if joined is None or joined is not _part(before, dim, 0):
        return None
    if joined.target is not aten.cat.default or len(joined.args[0]) != 2:
        return None
    first, rest = joined.args[0]
    along = joined.args[1] if len(joined.args) > 1 else 0
    rank = len(document.meanings)
    if along % rank != dim or first.meta["val"].shape[dim] != 1:
        return None
    if rest.meta["val"].dtype != torch.int64:
        return None
    axes = tuple(MaskAxis("Q" if m == "S" else m) for m in document.meanings)
    return _origin(View(rest, axes), vectors)


def _part(node: Any, dim: int, start: int) -> Any:
    """Return the source of a slice that leaves out one element of a dimension.

    start: 1 if that is the first element, 0 if it is the last. None for any other node.
    """
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    source, along, low, high = node.args
    size = source.meta["val"].shape[dim]
    if along % source.meta["val"].ndim != dim:
        return None
    whole = (low, min(high, size)) == (start, size - 1 + start)
    return source if whole else None


def _without_copies(node: Any) -> Any:
    """Look through copies, and changes of dtype that keep integers and bool."""
    while node.target in (
        aten._to_copy.default,
        aten.clone.default,
        aten.alias.default,
    ):
        dtypes = [n.meta["val"].dtype for n in (node, node.args[0])]
        if dtypes[0] not in (torch.int64, dtypes[1]):
            break
        node = node.args[0]
    return node


def _replaced(
    formula: Formula, position: VectorSource, vectors: VectorReader
) -> Formula:
    """Compare tokens in place of positions, wherever both sides are positions."""
    if isinstance(formula, And | Or):
        join = both if isinstance(formula, And) else either
        return join(*(_replaced(x, position, vectors) for x in formula.parts))
    if isinstance(formula, Not):
        return negated(_replaced(formula.part, position, vectors))
    if not isinstance(formula, Compare):
        return formula
    pair = (formula.rows, formula.columns)
    rows, columns = (origin(x, vectors) for x in pair)
    if rows is None or columns is None:
        return formula
    if {(o.node, o.meanings) for o in (rows, columns)} != {
        (position.node, position.meanings)
    }:
        return formula
    i = positions("Q", formula.rows.like.shape[2])
    j = positions("K", formula.columns.like.shape[3])
    pairs = ((i, rows.offset), (j, columns.offset))
    return compared(formula.sign, *(calculate(aten.add.Tensor, x) for x in pairs))


def ids(equalities: Sequence[Compare], visible: Vector | None) -> tuple[Vector, Vector]:
    """Make ids of rows [B or 1, 1, Sq or 1, 1] and columns [B or 1, 1, 1, Sk or 1]."""
    zero = constant(0)
    rows, columns = zero, zero
    for i, equality in enumerate(equalities):
        pair = _ranks(equality.rows, equality.columns)
        rows, columns = pair if i == 0 else _ranks(*_pairs((rows, columns), pair))
    if visible is not None:
        columns = call(aten.where.self, visible, columns, scalar(-1))
    return tuple(
        call(aten._to_copy.default, x, dtype=torch.int32) for x in (rows, columns)
    )  # type: ignore[return-value]


def can_be_ids(equality: Compare) -> bool:
    """Tell whether a comparison is an equality of integers, alike for all heads."""
    meanings = equality.rows.meanings | equality.columns.meanings
    return equality.sign == "==" and equality.rows.is_integer and "H" not in meanings


def _ranks(rows: Vector, columns: Vector) -> tuple[Vector, Vector]:
    in_order = call(sorted_columns, columns)
    return call(rank_of_rows, rows, in_order), call(rank_of_columns, columns, in_order)


def _pairs(a: tuple[Vector, Vector], b: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
    """Join two pairs of ranks; ranks of rows are at most the number of keys."""
    factor = max(x.like.shape[-1] for x in (a[1], b[1])) + 1
    first = (call(aten.mul.Tensor, x, factor) for x in a)
    rows, columns = (call(aten.add.Tensor, x, y) for x, y in zip(first, b, strict=True))
    return rows, columns


def sorted_columns(columns: Tensor) -> Tensor:
    """Sort columns [B or 1, 1, 1, Sk] in rising order, as int64."""
    return columns.to(torch.int64).sort(-1).values


def rank_of_columns(columns: Tensor, in_order: Tensor) -> Tensor:
    """Return equal numbers for equal columns, from 0."""
    return torch.searchsorted(in_order, columns.to(torch.int64).contiguous())


def rank_of_rows(rows: Tensor, in_order: Tensor) -> Tensor:
    """Return the rank of the columns that have a row's value; Sk if none has it.

    in_order: the columns [B or 1, 1, 1, Sk], sorted.
    """
    batch = max(rows.shape[0], in_order.shape[0])
    values = rows.to(torch.int64).transpose(2, 3).expand(batch, -1, -1, -1).contiguous()
    line = in_order.expand(batch, -1, -1, -1).contiguous()
    rank = torch.searchsorted(line, values)
    keys = line.shape[-1]
    is_equal = line.gather(-1, rank.clamp(max=keys - 1)) == values
    return torch.where(is_equal, rank, keys).transpose(2, 3)
