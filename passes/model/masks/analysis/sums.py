"""Numbers that are a part of the query plus a part of the key: q - k.

Comparisons take sums apart: q - k <= w is q - w <= k. That would not be the same in
floating point, nor for integers that are so large that they overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .formula import FLIPPED, SIGNS, Compare, Formula, only
from .vectors import Vector, both_axes, call, constant, scalar

aten = torch.ops.aten


class NoForm(Exception):
    """A value is no formula of rows and columns."""


@dataclass(frozen=True, eq=False)
class RowColumnSum:
    """The sum rows + columns, both int64 and far from overflow."""

    rows: Vector
    columns: Vector


def calculate(
    target: Any, args: tuple[Any, ...], **kwargs: Any
) -> Vector | RowColumnSum:
    """Compute a pointwise call on vectors and sums.

    Raises: NoForm.
    """
    if not any(isinstance(x, RowColumnSum) for x in args) and not both_axes(*args):
        return call(target, *args, **kwargs)
    if kwargs.keys() - {"alpha"} or kwargs.get("alpha", 1) != 1:
        if target is aten._to_copy.default and kwargs == {"dtype": torch.int64}:
            return args[0]  # type: ignore[no-any-return]
        raise NoForm(f"{target} with {kwargs}")
    if target is aten.add.Tensor:
        return _added(_parts(args[0]), _parts(args[1]))
    if target is aten.sub.Tensor:
        return _added(_parts(args[0]), _minus(_parts(args[1])))
    if target is aten.neg.default:
        return _minus(_parts(args[0]))
    raise NoForm(f"{target} of a query and a key")


def compared(sign: str, a: Any, b: Any) -> Formula:
    """Return a comparison as a formula.

    Raises: NoForm.
    """
    target = SIGNS[sign]
    if not isinstance(a, RowColumnSum) and not isinstance(b, RowColumnSum):
        if not isinstance(b, Vector):
            return only(call(target.overloadpacket.Scalar, a, b))
        if not both_axes(a, b) and not _from_data(a, b):
            return only(call(target, a, b))
        if a.is_columns:
            a, b, sign = b, a, FLIPPED[sign]
        dtype = torch.result_type(a.like, b.like)
        a = a if a.like.ndim else call(aten.view.default, a, (1, 1, 1, 1))
        return Compare(sign, _as(a, dtype), _as(b, dtype))
    lhs, rhs = _parts(a), _parts(b)
    rows = call(aten.sub.Tensor, lhs.rows, rhs.rows)
    columns = call(aten.sub.Tensor, rhs.columns, lhs.columns)
    _check(rows, columns)
    if not rows.is_rows or not columns.is_columns:
        return only(call(target, rows, columns))
    return Compare(sign, rows, columns)


def _as(x: Vector, dtype: torch.dtype) -> Vector:
    return x if x.dtype == dtype else call(aten._to_copy.default, x, dtype=dtype)


def _from_data(a: Vector, b: Vector) -> bool:
    """Tell whether known columns are compared with data, as in k < length.

    That is a limit, if the columns are in order.
    """
    columns, other = (a, b) if a.is_columns else (b, a)
    return columns.value is not None and other.value is None and not other.is_columns


def _parts(x: Any) -> RowColumnSum:
    if isinstance(x, RowColumnSum):
        return x
    vector = x if isinstance(x, Vector) else scalar(x)
    _check(vector)
    vector = _as(vector, torch.int64)
    zero = constant(0)
    return (
        RowColumnSum(zero, vector) if vector.is_columns else RowColumnSum(vector, zero)
    )


def _minus(x: RowColumnSum) -> RowColumnSum:
    return RowColumnSum(
        call(aten.neg.default, x.rows), call(aten.neg.default, x.columns)
    )


def _added(a: RowColumnSum, b: RowColumnSum) -> RowColumnSum:
    rows = call(aten.add.Tensor, a.rows, b.rows)
    columns = call(aten.add.Tensor, a.columns, b.columns)
    _check(rows, columns)
    return RowColumnSum(rows, columns)


def _check(*vectors: Vector) -> None:
    """Raise NoForm unless numbers are integers that are far from overflow."""
    for x in vectors:
        if x.dtype not in (torch.int64, torch.int32):
            raise NoForm(f"a sum of {x.dtype}")
        if x.value is None:
            if x.dtype != torch.int64:
                raise NoForm("a sum of int32 may overflow")
        elif x.value.numel() and bool((x.value.abs() >= 2**30).any()):
            raise NoForm("a sum of large numbers")
