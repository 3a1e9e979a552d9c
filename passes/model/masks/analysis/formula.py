"""Bool masks as formulas over comparisons of rows with columns.

le(arange [S], arange [S, 1]) & index(attention_mask, ...)
  ->  And(Compare("<=", columns, rows), Only(attention_mask))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .vectors import Vector, call
from .views import View

aten = torch.ops.aten


@dataclass(frozen=True)
class Only:
    """A bool vector: it depends on the query only, on the key only, or on neither."""

    vector: Vector


@dataclass(frozen=True)
class Compare:
    """The comparison rows <sign> columns, for two vectors of one dtype.

    columns vary with keys; rows do not, and are known only if they vary with queries.
    """

    sign: str  # "<", "<=", ">", ">=", "==", "!="
    rows: Vector
    columns: Vector


@dataclass(frozen=True)
class Dense:
    """A bool value of pairs that has no formula: an input, or computed for pairs."""

    view: View


@dataclass(frozen=True)
class Not:
    """A formula that holds where `part` does not."""

    part: Formula


@dataclass(frozen=True)
class And:
    """A formula that holds where all parts do; without parts: everywhere."""

    parts: tuple[Formula, ...]


@dataclass(frozen=True)
class Or:
    """A formula that holds where any part does; without parts: nowhere."""

    parts: tuple[Formula, ...]


Formula = Only | Compare | Dense | Not | And | Or

EVERYWHERE = And(())
NOWHERE = Or(())

_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
SIGNS = {
    "<": aten.lt.Tensor,
    "<=": aten.le.Tensor,
    ">": aten.gt.Tensor,
    ">=": aten.ge.Tensor,
    "==": aten.eq.Tensor,
    "!=": aten.ne.Tensor,
}


def only(vector: Vector) -> Formula:
    """Return the formula of a bool vector."""
    assert vector.dtype == torch.bool, f"a formula of {vector.dtype}"
    if vector.constant is None:
        return Only(vector)
    return EVERYWHERE if vector.constant else NOWHERE


def both(*parts: Formula) -> Formula:
    """Join the parts that are not trivial by And; parts of one axis become one part."""
    return _joined(parts, And, Or, aten.logical_and.default)


def either(*parts: Formula) -> Formula:
    """Join the parts that are not trivial by Or; parts of one axis become one part."""
    return _joined(parts, Or, And, aten.logical_or.default)


def negated(formula: Formula) -> Formula:
    """Negate a formula by its parts; comparisons of integers get the opposite sign."""
    if isinstance(formula, Not):
        return formula.part
    if isinstance(formula, And):
        return either(*map(negated, formula.parts))
    if isinstance(formula, Or):
        return both(*map(negated, formula.parts))
    if isinstance(formula, Only):
        return only(call(aten.logical_not.default, formula.vector))
    if isinstance(formula, Compare) and formula.rows.is_integer:  # floats may be NaN
        return Compare(_OPPOSITE[formula.sign], formula.rows, formula.columns)
    return Not(formula)


def conjunction(formula: Formula) -> tuple[Formula, ...]:
    """Return the parts of a formula that have to be true together."""
    return formula.parts if isinstance(formula, And) else (formula,)


def _joined(
    parts: tuple[Formula, ...],
    kind: type[And] | type[Or],
    other: type[And] | type[Or],
    join: torch._ops.OpOverload,
) -> Formula:
    flat: list[Formula] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, kind) else (part,))
    if other(()) in flat:
        return other(())
    merged: list[Formula] = []
    for part in flat:
        if part in merged:
            continue
        if _contradict(part, merged):
            return other(())
        place = next((i for i, k in enumerate(merged) if _one(part, k, kind)), None)
        if place is None:
            merged.append(part)
            continue
        before = merged[place]
        assert isinstance(before, Only) and isinstance(part, Only)
        joined = only(call(join, before.vector, part.vector))
        if joined == other(()):
            return joined
        if joined == kind(()):
            del merged[place]
        else:
            merged[place] = joined
    return merged[0] if len(merged) == 1 else kind(tuple(merged))


def _contradict(part: Formula, merged: list[Formula]) -> bool:
    """Tell whether the opposite of a comparison is among the parts that are kept."""
    if not isinstance(part, Compare) or not part.rows.is_integer:
        return isinstance(part, Not) and part.part in merged
    return Compare(_OPPOSITE[part.sign], part.rows, part.columns) in merged


def _one(a: Formula, b: Formula, kind: type[And] | type[Or]) -> bool:
    """Tell whether two vectors can become one without losing a known limit."""
    if not isinstance(a, Only) or not isinstance(b, Only):
        return False
    are_alike = (a.vector.value is None) == (b.vector.value is None)
    same = a.vector.meanings & {"Q", "K"} == b.vector.meanings & {"Q", "K"}
    return same and (are_alike or kind is Or)
