"""Equalities of rows and columns, and key padding, as one pair of segment ids.

    document[q] == document[k] and attention_mask[k]
      ->  q_segment_ids, kv_segment_ids: equal where the documents are; -1 if hidden

Any integers may stand for documents. Their ranks among the values of the keys serve as
ids: they are never negative, and fit into int32. Two equalities become one equality of
pairs of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .formula import Compare
from .vectors import Vector, call, constant, scalar

aten = torch.ops.aten


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
