"""Numbers that are a part of the query plus a part of the key: q - k.

Sums are taken apart by comparisons: q - k <= w is q - w <= k. In floating point that
would not be the same, nor where integers are so large that they overflow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cpcompile.passes.mask_formula import SIGNS, Compare, Formula, only
from cpcompile.passes.mask_vectors import Vector, both_axes, call, known

aten = torch.ops.aten
SCALARS = {
    "<": aten.lt.Scalar,
    "<=": aten.le.Scalar,
    ">": aten.gt.Scalar,
    ">=": aten.ge.Scalar,
    "==": aten.eq.Scalar,
    "!=": aten.ne.Scalar,
}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


class NoForm(Exception):
    """A value is no formula of rows and columns."""


@dataclass(frozen=True, eq=False)
class Sum:
    """rows + columns, both int64 and far from overflow."""

    rows: Vector
    columns: Vector


def calculate(target: Any, args: tuple[Any, ...], **kwargs: Any) -> Vector | Sum:
    """A pointwise call on vectors and sums. Raises: NoForm."""
    if not any(isinstance(x, Sum) for x in args) and not both_axes(*args):
        return call(target, *args, **kwargs)
    if kwargs.keys() - {"alpha"} or kwargs.get("alpha", 1) != 1:
        if target is aten._to_copy.default and kwargs == {"dtype": torch.int64}:
            return args[0]  # type: ignore[no-any-return]
        raise NoForm(f"{target} with {kwargs}")
    if target in (aten.add.Tensor, aten.add.Scalar):
        return _added(_parts(args[0]), _parts(args[1]))
    if target in (aten.sub.Tensor, aten.sub.Scalar):
        return _added(_parts(args[0]), _minus(_parts(args[1])))
    if target in (aten.rsub.Scalar, aten.rsub.Tensor):
        return _added(_parts(args[1]), _minus(_parts(args[0])))
    if target is aten.neg.default:
        return _added(_minus(_parts(args[0])), Sum(_zero(), _zero()))
    if target is aten.abs.default and isinstance(args[0], Sum):
        return args[0]  # the caller knows its sign in each of two cases
    raise NoForm(f"{target} of a query and a key")


def compared(target: Any, a: Any, b: Any) -> Formula:
    """A comparison as a formula. Raises: NoForm."""
    sign = next(sign for sign, op in SIGNS.items() if op is target)
    if not isinstance(a, Sum) and not isinstance(b, Sum):
        if not isinstance(b, Vector):
            return only(call(SCALARS[sign], a, b))
        if not both_axes(a, b) and not _from_data(a, b):
            return only(call(target, a, b))
        if isinstance(a, Vector):
            if a.is_columns:
                a, b, sign = b, a, _FLIPPED[sign]
            dtype = torch.result_type(a.like, b.like)
            rows, columns = (_as(x, dtype) for x in (a, b))
            return Compare(sign, rows, columns)
    left, right = _parts(a), _parts(b)
    rows = call(aten.sub.Tensor, left.rows, right.rows)
    columns = call(aten.sub.Tensor, right.columns, left.columns)
    _check(rows, columns)
    if not rows.is_rows or not columns.is_columns:
        return only(call(target, rows, columns))
    return Compare(sign, rows, columns)


def _as(x: Vector, dtype: torch.dtype) -> Vector:
    return x if x.dtype == dtype else call(aten._to_copy.default, x, dtype=dtype)


def _from_data(a: Vector, b: Vector) -> bool:
    """Whether known columns are compared with what comes with the data: k < length.

    That is a limit, if the columns are in order.
    """
    columns, other = (a, b) if a.is_columns else (b, a)
    return columns.value is not None and other.value is None and not other.is_columns


def _parts(x: Any) -> Sum:
    if isinstance(x, Sum):
        return x
    vector = x if isinstance(x, Vector) else known(torch.tensor(x))
    _check(vector)
    vector = _as(vector, torch.int64)
    return Sum(_zero(), vector) if vector.is_columns else Sum(vector, _zero())


def _zero() -> Vector:
    return known(torch.zeros((1,) * 4, dtype=torch.int64))


def _minus(x: Sum) -> Sum:
    return Sum(call(aten.neg.default, x.rows), call(aten.neg.default, x.columns))


def _added(a: Sum, b: Sum) -> Sum:
    rows = call(aten.add.Tensor, a.rows, b.rows)
    columns = call(aten.add.Tensor, a.columns, b.columns)
    _check(rows, columns)
    return Sum(rows, columns)


def _check(*vectors: Vector) -> None:
    """Numbers in a sum have to be integers that are far from overflow."""
    for x in vectors:
        if x.dtype not in (torch.int64, torch.int32):
            raise NoForm(f"a sum of {x.dtype}")
        if x.value is None:
            if x.dtype != torch.int64:
                raise NoForm("a sum of int32 may overflow")
        elif x.value.numel() and bool((x.value.abs() >= 2**30).any()):
            raise NoForm("a sum of large numbers")
