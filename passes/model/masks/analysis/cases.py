"""Read a pointwise program as a formula, or as numbers that formulas choose among.

    masked_fill(zeros, ~(k <= q), -inf)  ->  0.0 where k <= q;  -inf where k > q
    eq(that, 0.0)                        ->  k <= q

A number that varies with both queries and keys is read only if it is the sum of a part
of the query and a part of the key, such as q - k. A comparison takes such a sum apart
again: q - k < w is q - w < k. That holds for integers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .constant_masks import formula_of, numbers_in
from .formula import (
    EVERYWHERE,
    NOWHERE,
    SIGNS,
    Dense,
    Formula,
    both,
    either,
    negated,
    only,
)
from .mask_program import Unreadable
from .sums import NoForm, RowColumnSum, calculate, compared
from .vectors import Vector, VectorReader, constant, scalar
from .views import View, is_pointwise, operand, rearranged

aten = torch.ops.aten
_MOST_CASES = 16


@dataclass(frozen=True)
class Case:
    """A number, and the formula of where it holds."""

    where: Formula
    number: Vector | RowColumnSum


Cases = tuple[Case, ...]
Read = Formula | Cases


class CaseReader:
    """Reader of the views of one program as formulas or cases."""

    def __init__(self, vectors: VectorReader) -> None:
        self.vectors = vectors
        self._read: dict[Any, Read] = {}

    def formula(self, view: View) -> Formula:
        """Return the formula of a bool view; it is Dense where the view has none."""
        formula = self.read(view)
        assert not isinstance(formula, tuple), "a bool value is a formula"
        return formula

    def cases(self, view: View) -> Cases:
        """Return the cases of a view of numbers.

        Raises: NoForm, Unreadable.
        """
        cases = self.read(view)
        assert isinstance(cases, tuple), "numbers are cases"
        return cases

    def read(self, view: View) -> Read:
        """Return a formula if the view is bool, else cases.

        Raises: NoForm, Unreadable. A bool view of pairs without a form is Dense
        instead.
        """
        if view.key not in self._read:
            self._read[view.key] = self._new(view)
        return self._read[view.key]

    def _new(self, view: View) -> Read:
        if not view.is_pairwise:
            return self._vector(view)
        original = self.vectors.original(view)
        if original is not None:
            return self.read(original)
        try:
            if view.node.op == "get_attr":
                return self._constant(view)
            return self._call(view)
        except (NoForm, Unreadable):
            if view.dtype != torch.bool:
                raise
            return Dense(view)

    def _constant(self, view: View) -> Read:
        """Read pairs whose values are known.

        Raises: NoForm, Unreadable.
        """
        value = self.vectors.value(view)
        if view.dtype == torch.bool:
            formula = formula_of(value)
            return Dense(view) if formula is None else formula
        numbers = numbers_in(value)
        if numbers is None:
            raise NoForm(f"{view.node.name} has many numbers")
        return tuple(Case(where, number) for where, number in numbers)

    def _vector(self, view: View) -> Read:
        """Read a view that varies with queries or keys alone.

        Where it comes with the data, the call that computes it may say more: what it
        compares, or which constants it chooses among.
        """
        try:
            vector = self.vectors.read(view)
        except Unreadable:  # a row of pairs
            original = self.vectors.original(view)
            return self._call(view) if original is None else self.read(original)
        is_bool = vector.dtype == torch.bool
        if vector.value is None and (vector.is_columns or not is_bool):
            try:
                structure = self._structure(view)
            except (NoForm, Unreadable):
                return _one(vector)
            if is_bool or all(
                isinstance(c.number, Vector) and c.number.constant is not None
                for c in structure  # type: ignore[union-attr]
            ):
                return structure
        return _one(vector)

    def _structure(self, view: View) -> Read:
        """Read the call that computes a view, before it is rearranged."""
        while (original := rearranged(view)) is not None:
            view = original
        return self._call(view)

    def _call(self, view: View) -> Read:
        target, args, kwargs = view.node.target, view.node.args, view.node.kwargs
        if target is aten.full.default:
            return _one(constant(args[1], view.dtype))
        if not is_pointwise(target):
            raise NoForm(f"{target} is not pointwise")
        operands = [
            self.read(operand(view, a)) if isinstance(a, torch.fx.Node) else a
            for a in args
        ]
        if target is aten.where.self:
            return _choice(view.dtype, *operands)
        if target is aten._to_copy.default:
            return _converted(operands[0], view.dtype)
        rule = _CONNECTIVES.get(target.overloadpacket)  # type: ignore[union-attr]
        if rule is not None and view.dtype == torch.bool:
            return rule(*map(_truth, operands))
        return _combined(view.dtype, target, operands, kwargs)


def _one(vector: Vector) -> Read:
    return only(vector) if vector.dtype == torch.bool else (Case(EVERYWHERE, vector),)


def _truth(x: Any) -> Formula:
    """Return the formula of a value that is used as a condition."""
    if isinstance(x, bool | int | float):
        return EVERYWHERE if x else NOWHERE
    if not isinstance(x, tuple):
        return x  # type: ignore[no-any-return]
    return either(*(both(c.where, compared("!=", c.number, scalar(0))) for c in x))


def _converted(x: Any, dtype: torch.dtype) -> Read:
    """Convert numbers or a formula to a dtype; true becomes 1, and false 0."""
    if dtype == torch.bool:
        return _truth(x)
    cases = x if isinstance(x, tuple) else _numbers(x)
    return _merged(
        [
            Case(c.where, calculate(aten._to_copy.default, (c.number,), dtype=dtype))
            for c in cases
        ]
    )


def _numbers(x: Any) -> Cases:
    """Return the cases of an operand; those of a formula are True and False."""
    if isinstance(x, tuple):
        return x
    if isinstance(x, bool | int | float):
        return (Case(EVERYWHERE, scalar(x)),)
    return (Case(x, constant(True)), Case(negated(x), constant(False)))


def _choice(dtype: torch.dtype, condition: Any, a: Any, b: Any) -> Read:
    """Choose a where the condition holds, else b, in the dtype of the result."""
    c = _truth(condition)
    if dtype == torch.bool:
        return either(both(c, _truth(a)), both(negated(c), _truth(b)))
    first, second = (_converted(_numbers(x), dtype) for x in (a, b))
    assert isinstance(first, tuple) and isinstance(second, tuple)
    return _merged(
        [
            *(Case(both(c, x.where), x.number) for x in first),
            *(Case(both(negated(c), x.where), x.number) for x in second),
        ]
    )


def _combined(
    dtype: torch.dtype, target: Any, operands: list[Any], kwargs: dict[str, Any]
) -> Read:
    """Apply a call to numbers: one case for every choice of a case of each operand."""
    sign = _SIGN_OF.get(target.overloadpacket)
    tensors = [i for i, x in enumerate(operands) if not _is_plain(x)]
    results: list[Case] = []
    truths: list[Formula] = []
    for chosen in itertools.product(*(_numbers(operands[i]) for i in tensors)):
        where = both(*(case.where for case in chosen))
        if where == NOWHERE:
            continue
        args = list(operands)
        for i, case in zip(tensors, chosen, strict=True):
            args[i] = case.number
        if sign is not None:
            truths.append(both(where, compared(sign, *args)))
            continue
        number = calculate(target, tuple(args), **kwargs)
        if dtype == torch.bool:
            if not isinstance(number, Vector):
                raise NoForm(f"{target} of a sum")
            truths.append(both(where, only(number)))
        else:
            results.append(Case(where, number))
    return either(*truths) if dtype == torch.bool else _merged(results)


def _merged(cases: list[Case]) -> Cases:
    """Merge the cases of one number into one case."""
    merged: list[Case] = []
    for case in cases:
        if case.where == NOWHERE:
            continue
        for i, before in enumerate(merged):
            if _equal(before.number, case.number):
                merged[i] = Case(either(before.where, case.where), before.number)
                break
        else:
            merged.append(case)
    if len(merged) > _MOST_CASES:
        raise NoForm(f"{len(merged)} cases")
    return tuple(merged)


def _equal(a: Vector | RowColumnSum, b: Vector | RowColumnSum) -> bool:
    if a is b:
        return True
    if isinstance(a, RowColumnSum) or isinstance(b, RowColumnSum):
        return False
    constants = (a.constant, b.constant)
    return None not in constants and constants[0] == constants[1]


def _is_plain(x: Any) -> bool:
    return isinstance(x, bool | int | float | str | torch.dtype | type(None))


def _differ(a: Formula, b: Formula) -> Formula:
    return either(both(a, negated(b)), both(negated(a), b))


_CONNECTIVES: dict[Any, Callable[..., Formula]] = {
    aten.bitwise_and: both,
    aten.logical_and: both,
    aten.mul: both,
    aten.bitwise_or: either,
    aten.logical_or: either,
    aten.bitwise_xor: _differ,
    aten.logical_xor: _differ,
    aten.bitwise_not: negated,
    aten.logical_not: negated,
}
_SIGN_OF = {op.overloadpacket: sign for sign, op in SIGNS.items()}
