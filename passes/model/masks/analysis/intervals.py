"""Formulas as intervals of keys per query.

    k <= q          ->  [0, q + 1)
    k > q - 8       ->  [q - 7, Sk)
    q // 8 == k // 8  ->  [8 (q // 8), 8 (q // 8) + 8)

If all limits are known, a row may have several intervals on the way, and every
connective is exact; at the end there has to be one interval. Where a limit comes with
the data, a row has one interval, and a union has to be one interval whatever the data
is: both sides start, or both end, at the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formula import FLIPPED, And, Compare, Formula, Not, Only, Or
from .vectors import Vector, call, constant, known, scalar

aten = torch.ops.aten
_MOST = 4  # intervals per row


@dataclass(frozen=True, eq=False)
class KnownIntervals:
    """Known intervals per row, in order and apart; lo and hi are [B or 1, Sq or 1, m].

    Unused ones are at the end, as [n, n) of n keys.
    """

    lo: Tensor
    hi: Tensor

    @property
    def is_single(self) -> bool:
        """True if no row has more than one interval."""
        return self.lo.shape[-1] == 1


@dataclass(frozen=True, eq=False)
class Bounds:
    """One interval per row; a row that sees nothing may have lo > hi."""

    lo: Vector
    hi: Vector


Intervals = KnownIntervals | Bounds


def intervals(formula: Formula, keys: int) -> Intervals | None:
    """Return the keys for which a formula is true; None if they have no such form."""
    if isinstance(formula, Only):
        return _of_vector(formula.vector, keys)
    if isinstance(formula, Compare):
        return _of_comparison(formula, keys)
    if isinstance(formula, Not):
        part = intervals(formula.part, keys)
        return complement(part, keys) if isinstance(part, KnownIntervals) else None
    if isinstance(formula, And | Or):
        how = intersection if isinstance(formula, And) else union
        return joined([intervals(part, keys) for part in formula.parts], keys, how)
    return None


def intersection(a: Intervals, b: Intervals, keys: int) -> Intervals | None:
    """Return the keys that both sides allow; None if they have no such form."""
    if isinstance(a, KnownIntervals) and isinstance(b, KnownIntervals):
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
    """Return the keys that one of the sides allows; None if they have no such form."""
    if isinstance(a, KnownIntervals) and isinstance(b, KnownIntervals):
        sizes = torch.broadcast_shapes(a.lo.shape[:-1], b.lo.shape[:-1])
        los, his = (
            [x.expand(*sizes, -1) for x in p] for p in ((a.lo, b.lo), (a.hi, b.hi))
        )
        return _in_order(torch.cat(los, -1), torch.cat(his, -1), keys)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, KnownIntervals) and bool((x.lo >= x.hi).all()):
            return y
    first, second = _bounds(a), _bounds(b)
    if first is None or second is None:
        return None
    if first.lo.constant is not None and first.lo.constant == second.lo.constant:
        return Bounds(first.lo, call(aten.maximum.default, first.hi, second.hi))
    if first.hi.constant is not None and first.hi.constant == second.hi.constant:
        return Bounds(call(aten.minimum.default, first.lo, second.lo), first.hi)
    return None


def complement(a: KnownIntervals, keys: int) -> KnownIntervals | None:
    """Return the keys outside of known intervals; None if they have no such form."""
    start = torch.zeros_like(a.lo[..., :1])
    lo = torch.cat([start, a.hi], -1)
    hi = torch.cat([a.lo, start + keys], -1)
    return _in_order(lo, hi, keys)


def _bounds(a: Intervals) -> Bounds | None:
    if isinstance(a, Bounds):
        return a
    if not a.is_single:
        return None
    # [B, Sq, 1] is [B, H = 1, Sq, 1]
    return Bounds(known(a.lo.unsqueeze(1)), known(a.hi.unsqueeze(1)))


def _in_order(lo: Tensor, hi: Tensor, keys: int) -> KnownIntervals | None:
    """Sort and merge intervals that may overlap, touch or be empty."""
    lo, hi = torch.broadcast_tensors(lo, hi)
    real = lo < hi
    lo, order = torch.where(real, lo, keys).sort(-1)
    hi = torch.where(real, hi, keys).gather(-1, order)
    reach = hi.cummax(-1).values
    real = lo < keys
    edge = torch.ones_like(real[..., :1])
    apart = torch.cat([edge, lo[..., 1:] > reach[..., :-1]], -1)
    begins, ends = apart & real, torch.cat([(apart | ~real)[..., 1:], edge], -1) & real
    return _places(begins, lo, ends, reach, keys)


def _places(
    begins: Tensor, firsts: Tensor, ends: Tensor, afters: Tensor, keys: int
) -> KnownIntervals | None:
    """Collect the intervals [first, after) that begin and end at the marked places.

    None if a row has too many.
    """
    most = int(begins.sum(-1).max()) if begins.numel() else 0
    if most > _MOST:
        return None
    lo, hi = (
        torch.where(chosen, at, keys).sort(-1).values[..., : max(most, 1)]
        for chosen, at in ((begins, firsts), (ends, afters))
    )
    return KnownIntervals(*_once(lo, hi))


def _once(*pair: Tensor) -> tuple[Tensor, ...]:
    """Keep what is alike in all batches or rows only once."""
    for dim in (0, 1):
        size = pair[0].shape[dim]
        if size > 1 and all(bool((x == x.narrow(dim, 0, 1)).all()) for x in pair):
            pair = tuple(x.narrow(dim, 0, 1) for x in pair)
    return pair


def _of_vector(vector: Vector, keys: int) -> Intervals | None:
    """Read a bool vector: whole rows, or keys that are the same for all rows."""
    if "H" in vector.meanings:
        return None
    if not vector.is_columns:
        whole = call(aten.where.self, vector, scalar(keys), constant(0))
        return _settled(Bounds(constant(0), whole), keys)
    if vector.value is None:
        return None
    visible = vector.value[:, 0].to(torch.int8)  # [B or 1, 1, Sk]
    edge = torch.zeros_like(visible[..., :1])
    change = torch.diff(torch.cat([edge, visible, edge], -1), dim=-1)
    index = torch.arange(keys + 1)
    return _places(change == 1, index, change == -1, index, keys)


def _of_comparison(compare: Compare, keys: int) -> Intervals | None:
    """Read the keys whose column compares so with the row.

    None unless the columns are known, and in order.
    """
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
        longs = (
            call(aten._to_copy.default, x, dtype=torch.int64) for x in (rows, columns)
        )
        negatives = (call(aten.neg.default, x) for x in longs)
        return _of_comparison(Compare(FLIPPED[compare.sign], *negatives), keys)
    # How many columns are < row, and <= row.
    first, after = (_count(line, rows, right) for right in (False, True))
    if compare.sign == "!=":
        equal = _settled(Bounds(first, after), keys)
        return complement(equal, keys) if isinstance(equal, KnownIntervals) else None
    lo = {">": 0, ">=": 0, "<": after}.get(compare.sign, first)
    hi = {"<": keys, "<=": keys, ">": first}.get(compare.sign, after)
    bounds = (x if isinstance(x, Vector) else constant(x) for x in (lo, hi))
    return _settled(Bounds(*bounds), keys)


def _settled(bounds: Bounds, keys: int) -> Intervals | None:
    """Turn bounds whose values are known into known intervals."""
    if bounds.lo.value is None or bounds.hi.value is None:
        return bounds
    lo, hi = (
        x.value[:, 0, :, :1] for x in (bounds.lo, bounds.hi) if x.value is not None
    )
    return _in_order(lo, hi, keys)


def count_below(line: Tensor, rows: Tensor, right: bool) -> Tensor:
    """Count the entries of line [B or 1, Sk] that are < rows [B or 1, 1, Sq or 1, 1].

    right: count those that are <= rows.
    """
    flat = rows.flatten(1).to(torch.int64)
    batch = max(len(line), len(flat))
    sorted_lines = line.expand(batch, -1).contiguous()
    values = flat.expand(batch, -1).contiguous()
    return torch.searchsorted(sorted_lines, values, right=right)[:, None, :, None]


def _count(line: Tensor, rows: Vector, right: bool) -> Vector:
    if rows.value is not None and rows.value.ndim == 0:
        rows = known(rows.value.view(1, 1, 1, 1))
    line = line.contiguous()
    whole = Vector(torch.empty(line.shape, dtype=line.dtype, device="meta"), line)
    return call(count_below, whole, rows, right)


def joined(
    parts: Sequence[Intervals | None],
    keys: int,
    how: Callable[[Any, Any, int], Intervals | None] = intersection,
) -> Intervals | None:
    """Return the keys that all parts allow; or any of them, if `how` is union."""
    end = torch.full((1, 1, 1), keys)
    result: Intervals | None = KnownIntervals(
        end * 0 if how is intersection else end, end
    )
    # Known parts first: they become as narrow as they can.
    for part in sorted(parts, key=lambda p: isinstance(p, Bounds)):
        if part is None or result is None:
            return None
        result = how(result, part, keys)
    return result


def key_ranges_text(lo: Tensor, hi: Tensor, queries: int, keys: int) -> str:
    """Name key ranges [B or 1, Sq or 1, 1]; "key ranges" if no other name fits."""
    if lo.shape[0] != 1:
        return "key ranges per batch row"
    rows = torch.arange(queries)
    first, after = (x[0, :, 0].expand(queries) for x in (lo, hi))
    chunk = _chunk(first, rows)
    before = _distance(-first, -rows, 0)
    ahead = _distance(after, rows, keys)
    starts_at_0, ends_at_last = not bool((first > 0).any()), bool((after == keys).all())
    if starts_at_0 and ahead is not None:
        return "causal" if ahead == 1 else f"causal, shifted by {ahead - 1}"
    if chunk is not None:
        if torch.equal(after, rows + 1):
            return f"causal, chunks of {chunk}"
        if torch.equal(after, (first + chunk).clamp(max=keys)):
            return f"chunks of {chunk}"
    if before is not None and ahead is not None:
        if ahead == 1:
            return f"causal, window {before + 1}"
        if ahead == before + 1:
            return f"window of {before} to each side"
        return f"window of {before} back and {ahead - 1} ahead"
    if before is not None and ends_at_last:
        return f"keys from {before} back on"
    return "key ranges"


def _distance(limit: Tensor, rows: Tensor, end: int) -> int | None:
    """Return the one distance of a limit from its row; None if rows differ.

    Limits that are clamped to `end` may be nearer.
    """
    offsets = (limit - rows)[limit < end]
    if not len(offsets) or not torch.equal(limit, (rows + offsets[0]).clamp(max=end)):
        return None
    return int(offsets[0])


def _chunk(first: Tensor, rows: Tensor) -> int | None:
    """Return the size of chunks, if each row starts with its chunk."""
    later = (first > 0).nonzero()
    chunk = int(later[0]) if len(later) else 0
    if not chunk:
        return None
    return chunk if torch.equal(first, rows // chunk * chunk) else None
