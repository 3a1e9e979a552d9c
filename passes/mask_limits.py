"""Formulas as intervals of keys per query.

    k <= q          ->  [0, q + 1)
    k > q - 8       ->  [q - 7, Sk)
    q // 8 == k // 8  ->  [8 (q // 8), 8 (q // 8) + 8)

If all is known, a row may have several intervals in between, and every connective is
exact; at the end there has to be one. Where a limit comes with the data, there is one
interval, and a union has to be one whatever the data is: both sides start, or both end,
at the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.passes.mask_formula import And, Compare, Formula, Not, Only, Or
from cpcompile.passes.mask_vectors import Vector, call, known

aten = torch.ops.aten
_MOST = 4  # intervals per row


@dataclass(frozen=True, eq=False)
class Known:
    """Per row its intervals, in order and apart; lo and hi are [B or 1, Sq or 1, m].

    Unused ones are at the end, as [n, n) of n keys.
    """

    lo: Tensor
    hi: Tensor


@dataclass(frozen=True, eq=False)
class Bounds:
    """One interval per row; a row that sees nothing may have lo > hi."""

    lo: Vector
    hi: Vector


Intervals = Known | Bounds


def intervals(formula: Formula, keys: int) -> Intervals | None:
    """The keys for which a formula is true, or None if that has no such form."""
    if isinstance(formula, Only):
        return _of_vector(formula.vector, keys)
    if isinstance(formula, Compare):
        return _of_comparison(formula, keys)
    if isinstance(formula, Not):
        part = intervals(formula.part, keys)
        return complement(part, keys) if isinstance(part, Known) else None
    if isinstance(formula, And | Or):
        join = intersection if isinstance(formula, And) else union
        parts = [intervals(part, keys) for part in formula.parts]
        result: Intervals | None = _everything(keys)
        if isinstance(formula, Or):
            result = complement(_everything(keys), keys)
        # What is known first: it becomes as narrow as it can.
        for part in sorted(parts, key=lambda p: isinstance(p, Bounds)):
            if part is None or result is None:
                return None
            result = join(result, part, keys)
        return result
    return None


def intersection(a: Intervals, b: Intervals, keys: int) -> Intervals | None:
    """Where both hold."""
    if isinstance(a, Known) and isinstance(b, Known):
        lo = torch.maximum(a.lo.unsqueeze(-1), b.lo.unsqueeze(-2)).flatten(-2)
        hi = torch.minimum(a.hi.unsqueeze(-1), b.hi.unsqueeze(-2)).flatten(-2)
        return _in_order(lo, hi, keys)
    first, second = _bounds(a), _bounds(b)
    if first is None or second is None:
        return None
    return Bounds(
        call(aten.maximum.default, first.lo, second.lo),
        call(aten.minimum.default, first.hi, second.hi),
    )


def union(a: Intervals, b: Intervals, keys: int) -> Intervals | None:
    """Where one of them holds, if that has a form."""
    if isinstance(a, Known) and isinstance(b, Known):
        sizes = torch.broadcast_shapes(a.lo.shape[:-1], b.lo.shape[:-1])
        los, his = (
            [x.expand(*sizes, -1) for x in p] for p in ((a.lo, b.lo), (a.hi, b.hi))
        )
        return _in_order(torch.cat(los, -1), torch.cat(his, -1), keys)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Known) and bool((x.lo >= x.hi).all()):
            return y
    first, second = _bounds(a), _bounds(b)
    if first is None or second is None:
        return None
    if first.lo.constant is not None and first.lo.constant == second.lo.constant:
        return Bounds(first.lo, call(aten.maximum.default, first.hi, second.hi))
    if first.hi.constant is not None and first.hi.constant == second.hi.constant:
        return Bounds(call(aten.minimum.default, first.lo, second.lo), first.hi)
    return None


def complement(a: Known, keys: int) -> Known | None:
    """Where it does not hold."""
    start = torch.zeros_like(a.lo[..., :1])
    lo = torch.cat([start, a.hi], -1)
    hi = torch.cat([a.lo, start + keys], -1)
    return _in_order(lo, hi, keys)


def _everything(keys: int) -> Known:
    lo = torch.zeros(1, 1, 1, dtype=torch.int64)
    return Known(lo, lo + keys)


def _bounds(a: Intervals) -> Bounds | None:
    if isinstance(a, Bounds):
        return a
    if a.lo.shape[-1] != 1:
        return None
    # [B, Sq, 1] is [B, H = 1, Sq, 1]
    return Bounds(known(a.lo.unsqueeze(1)), known(a.hi.unsqueeze(1)))


def _in_order(lo: Tensor, hi: Tensor, keys: int) -> Known | None:
    """Intervals that may overlap, touch or be empty, as ones that are in order."""
    lo, hi = torch.broadcast_tensors(lo, hi)
    empty = lo >= hi
    lo = torch.where(empty, keys, lo)
    hi = torch.where(empty, keys, hi)
    lo, order = lo.sort(-1)
    hi = hi.gather(-1, order)
    reach = hi.cummax(-1).values
    begins = torch.ones_like(lo, dtype=torch.bool)
    begins[..., 1:] = lo[..., 1:] > reach[..., :-1]
    begins &= lo < keys  # those that are empty begin nothing
    number = begins.cumsum(-1) - 1
    most = int(number.max()) + 1 if number.numel() else 0
    if most > _MOST:
        return None
    shape = (*lo.shape[:-1], max(most, 1))
    new_lo = torch.full(shape, keys, dtype=lo.dtype)
    new_hi = torch.full(shape, keys, dtype=lo.dtype)
    real = lo < keys
    at = number.clamp(min=0)
    new_lo.scatter_reduce_(-1, at, torch.where(real, lo, keys), "amin")
    new_hi.fill_(0).scatter_reduce_(-1, at, torch.where(real, hi, 0), "amax")
    new_hi = torch.where(new_lo >= keys, keys, new_hi)
    return Known(*_once(new_lo, new_hi))


def _once(*pair: Tensor) -> tuple[Tensor, ...]:
    """What is alike in all batches or rows is so once."""
    for dim in (0, 1):
        size = pair[0].shape[dim]
        if size > 1 and all(bool((x == x.narrow(dim, 0, 1)).all()) for x in pair):
            pair = tuple(x.narrow(dim, 0, 1) for x in pair)
    return pair


def _of_vector(vector: Vector, keys: int) -> Intervals | None:
    """A bool vector: whole rows, or keys that are the same for all rows."""
    if "H" in vector.meanings:
        return None
    if not vector.is_columns:
        counts = call(aten.mul.Tensor, vector, keys)
        zero = known(torch.zeros(1, 1, 1, 1, dtype=torch.int64))
        bounds = Bounds(zero, call(aten.add.Tensor, counts, zero))
        return _settled(bounds, keys)
    if vector.value is None:
        return None
    seen = vector.value[:, 0, 0, :].to(torch.int8)
    edge = torch.zeros_like(seen[:, :1])
    change = torch.diff(torch.cat([edge, seen, edge], -1), dim=-1)
    most = int((change == 1).sum(-1).max())
    if most > _MOST:
        return None
    lo = torch.full((len(seen), 1, max(most, 1)), keys)
    hi = lo.clone()
    for b, row in enumerate(change):
        for ends, value in ((lo, 1), (hi, -1)):
            found = (row == value).nonzero().flatten()
            ends[b, 0, : len(found)] = found
    return Known(*_once(lo, hi))


def _of_comparison(compare: Compare, keys: int) -> Intervals | None:
    """Keys whose column compares so with the row: columns have to be in order."""
    rows, columns = compare.rows, compare.columns
    if columns.value is None or not columns.is_integer or not rows.is_integer:
        return None
    if "H" in rows.meanings | columns.meanings:
        return None
    line = columns.value[:, 0, 0, :].to(torch.int64).expand(-1, keys)
    if bool((line.abs() >= 2**62).any()):
        return None
    step = line.diff(dim=-1)
    if bool((step < 0).any()):
        if bool((step > 0).any()):
            return None
        # Falling columns: their negatives rise, compared with the negative row.
        turned = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
        line = -line
        rows = call(
            aten.neg.default, call(aten._to_copy.default, rows, dtype=torch.int64)
        )
        sign = turned.get(compare.sign, compare.sign)
    else:
        sign = compare.sign
    found = [_search(line, rows, right) for right in (False, True)]
    first, after = found  # how many columns are < row, and <= row
    zero, end = (
        known(torch.full((1, 1, 1, 1), n, dtype=torch.int64)) for n in (0, keys)
    )
    if sign == "!=":
        equal = _settled(Bounds(first, after), keys)
        return complement(equal, keys) if isinstance(equal, Known) else None
    bounds = {
        ">": Bounds(zero, first),
        ">=": Bounds(zero, after),
        "<": Bounds(after, end),
        "<=": Bounds(first, end),
        "==": Bounds(first, after),
    }[sign]
    return _settled(bounds, keys)


def _settled(bounds: Bounds, keys: int) -> Intervals | None:
    """Bounds whose values are known."""
    if bounds.lo.value is None or bounds.hi.value is None:
        return bounds
    lo, hi = (
        x.value[:, 0, :, :1] for x in (bounds.lo, bounds.hi) if x.value is not None
    )
    return _in_order(lo, hi, keys)


def count_below(line: Tensor, rows: Tensor, right: bool) -> Tensor:
    """How many of line [B or 1, Sk] are < rows [B or 1, 1, Sq or 1, 1]; or <=."""
    flat = rows.flatten(1).to(torch.int64)
    batch = max(len(line), len(flat))
    sorted_lines = line.expand(batch, -1).contiguous()
    values = flat.expand(batch, -1).contiguous()
    return torch.searchsorted(sorted_lines, values, right=right)[:, None, :, None]


def _search(line: Tensor, rows: Vector, right: bool) -> Vector:
    if rows.value is not None and rows.value.ndim == 0:
        rows = known(rows.value.view(1, 1, 1, 1))
    if rows.value is None and bool((line.diff(dim=-1) == 1).all()) and len(line) == 1:
        # Positions: no search is needed.
        start, keys = int(line[0, 0]), line.shape[-1]
        near = call(aten._to_copy.default, rows, dtype=torch.int64)
        near = call(aten.clamp.default, near, start - 1, start + keys)
        at = call(aten.add.Tensor, near, int(right) - start)
        return call(aten.clamp.default, at, 0, keys)
    line = line.contiguous()
    whole = Vector(torch.empty(line.shape, dtype=line.dtype, device="meta"), line)
    return call(count_below, whole, rows, right)


def merged(parts: Sequence[Intervals], keys: int) -> Intervals | None:
    """What all parts allow."""
    result: Any = _everything(keys)
    for part in sorted(parts, key=lambda p: isinstance(p, Bounds)):
        if result is None:
            return None
        result = intersection(result, part, keys)
    return result  # type: ignore[no-any-return]
