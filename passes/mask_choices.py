"""Numbers that formulas choose among, and what calls make of them.

where(k <= q, 0.0, -inf)  ->  0.0 where k <= q;  -inf where k > q
eq(that, 0.0)             ->  k <= q
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cpcompile.passes.mask_formula import (
    EVERYWHERE,
    NOWHERE,
    SIGNS,
    Formula,
    both,
    either,
    negated,
    only,
)
from cpcompile.passes.mask_sums import NoForm, Sum, calculate, compared
from cpcompile.passes.mask_vectors import Vector, known

aten = torch.ops.aten
_MOST_CASES = 16


@dataclass(frozen=True)
class Case:
    """A number, and where it holds."""

    where: Formula
    number: Vector | Sum


Cases = tuple[Case, ...]
Read = Formula | Cases


def is_pointwise(target: Any) -> bool:
    """Whether every element of the result comes from one element of each operand."""
    if target in _UNTAGGED:
        return True
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def scalar(x: Any) -> Vector:
    return known(torch.tensor(x))


def one(vector: Vector) -> Read:
    return only(vector) if vector.dtype == torch.bool else (Case(EVERYWHERE, vector),)


def truth(x: Any) -> Formula:
    """A formula of what is used as one."""
    if isinstance(x, bool | int | float):
        return EVERYWHERE if x else NOWHERE
    if not isinstance(x, tuple):
        return x  # type: ignore[no-any-return]
    return either(
        *(both(c.where, compared(aten.ne.Tensor, c.number, scalar(0))) for c in x)
    )


def converted(x: Any, dtype: torch.dtype) -> Read:
    """A change of dtype; bool becomes 1 where it is true and 0 elsewhere."""
    if dtype == torch.bool:
        return truth(x)
    cases = x if isinstance(x, tuple) else numbers(x)
    return _merged(
        [
            Case(c.where, calculate(aten._to_copy.default, (c.number,), dtype=dtype))
            for c in cases
        ]
    )


def numbers(x: Any) -> Cases:
    """Cases of an operand; a formula is true or false."""
    if isinstance(x, tuple):
        return x
    if isinstance(x, bool | int | float):
        return (Case(EVERYWHERE, scalar(x)),)
    dims = (1,) * len("BHQK")
    values = [known(torch.full(dims, b)) for b in (True, False)]
    return (Case(x, values[0]), Case(negated(x), values[1]))


def choice(dtype: torch.dtype, condition: Any, a: Any, b: Any) -> Read:
    """a where the condition holds, else b, in the dtype of the result."""
    c = truth(condition)
    if dtype == torch.bool:
        return either(both(c, truth(a)), both(negated(c), truth(b)))
    first, second = (converted(numbers(x), dtype) for x in (a, b))
    assert isinstance(first, tuple) and isinstance(second, tuple)
    return _merged(
        [
            *(Case(both(c, x.where), x.number) for x in first),
            *(Case(both(negated(c), x.where), x.number) for x in second),
        ]
    )


def combined(
    dtype: torch.dtype, target: Any, operands: list[Any], kwargs: dict[str, Any]
) -> Read:
    """A call on numbers: one case for every choice of a case of each operand."""
    tensors = [i for i, x in enumerate(operands) if not _is_plain(x)]
    results: list[Case] = []
    truths: list[Formula] = []
    for chosen in itertools.product(*(numbers(operands[i]) for i in tensors)):
        where = both(*(case.where for case in chosen))
        if where == NOWHERE:
            continue
        args = list(operands)
        for i, case in zip(tensors, chosen, strict=True):
            args[i] = case.number
        if target in _COMPARISONS:
            truths.append(both(where, compared(_COMPARISONS[target], *args)))
            continue
        number = calculate(target, tuple(args), **kwargs)
        if dtype == torch.bool:
            if not isinstance(number, Vector):
                raise NoForm(f"{target} of a sum")
            truths.append(both(where, only(number)))
        elif isinstance(number, Sum) and target is aten.abs.default:
            positive = compared(aten.ge.Tensor, number, scalar(0))
            minus = calculate(aten.neg.default, (number,))
            results.append(Case(both(where, positive), number))
            results.append(Case(both(where, negated(positive)), minus))
        else:
            results.append(Case(where, number))
    return either(*truths) if dtype == torch.bool else _merged(results)


def _merged(cases: list[Case]) -> Cases:
    """Cases of one value become one."""
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


def _equal(a: Vector | Sum, b: Vector | Sum) -> bool:
    if a is b:
        return True
    if isinstance(a, Sum) or isinstance(b, Sum):
        return False
    constants = (a.constant, b.constant)
    return None not in constants and constants[0] == constants[1]


def _is_plain(x: Any) -> bool:
    return isinstance(x, bool | int | float | str | torch.dtype | type(None))


def _differ(a: Formula, b: Formula) -> Formula:
    return either(both(a, negated(b)), both(negated(a), b))


def _agree(a: Formula, b: Formula) -> Formula:
    return either(both(a, b), both(negated(a), negated(b)))


Connective = Callable[..., Formula]

CONNECTIVES: dict[Any, Connective] = {
    aten.bitwise_and.Tensor: both,
    aten.bitwise_and.Scalar: both,
    aten.logical_and.default: both,
    aten.mul.Tensor: both,
    aten.bitwise_or.Tensor: either,
    aten.bitwise_or.Scalar: either,
    aten.logical_or.default: either,
    aten.bitwise_xor.Tensor: _differ,
    aten.bitwise_xor.Scalar: _differ,
    aten.logical_xor.default: _differ,
    aten.bitwise_not.default: negated,
    aten.logical_not.default: negated,
}
_COMPARISONS = {
    **{op: op for op in SIGNS.values()},
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
}
_UNTAGGED = (
    aten._to_copy.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
)
