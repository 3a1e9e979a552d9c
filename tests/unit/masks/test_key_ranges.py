"""Intervals of keys: every connective against the pairs themselves."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.passes.model.masks.analysis.formula import (
    SIGNS,
    Compare,
    Formula,
    Not,
    both,
    either,
    negated,
    only,
)
from cpcompile.passes.model.masks.analysis.intervals import (
    Bounds,
    KnownIntervals,
    complement,
    intersection,
    intervals,
    key_ranges_text,
    union,
)
from cpcompile.passes.model.masks.analysis.vectors import known

KEYS = st.integers(1, 9)
SIGN = st.sampled_from(sorted(SIGNS))


def pairs(found: KnownIntervals, queries: int, keys: int) -> torch.Tensor:
    """[B, Sq, Sk] of intervals; they are in order and apart."""
    assert (
        (found.lo[..., 1:] > found.hi[..., :-1])
        .logical_or(found.lo[..., 1:] == keys)
        .all()
    )
    j = torch.arange(keys)
    seen = (found.lo[..., None] <= j) & (j < found.hi[..., None])
    return seen.any(-2).expand(-1, queries, -1)


def dense(formula: Formula, queries: int, keys: int) -> torch.Tensor:
    """[B, Sq, Sk] of a formula, by its definition."""
    if hasattr(formula, "vector"):
        value = formula.vector.value
    elif hasattr(formula, "sign"):
        rows, columns = formula.rows.value, formula.columns.value
        value = SIGNS[formula.sign](rows, columns)
    elif isinstance(formula, Not):
        return ~dense(formula.part, queries, keys)
    else:
        name = type(formula).__name__
        value = torch.full((1, queries, keys), name == "And")
        for part in formula.parts:
            other = dense(part, queries, keys)
            value = value & other if name == "And" else value | other
        return value
    return value.expand(-1, -1, queries, keys)[:, 0]


@st.composite
def formulas(draw, queries: int, keys: int, depth: int = 2) -> Formula:
    kind = draw(st.integers(0, 5)) if depth else draw(st.integers(0, 2))
    values = st.integers(-2, 5)
    if kind == 0:
        rows = draw(st.lists(values, min_size=queries, max_size=queries))
        columns = draw(st.lists(values, min_size=keys, max_size=keys))
        order = draw(st.sampled_from(["rising", "falling", "any"]))
        if order != "any":
            columns = sorted(columns, reverse=order == "falling")
        return compare(draw(SIGN), rows, columns)
    if kind in (1, 2):
        size = (queries, keys)[kind - 1]
        bits = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        shape = (1, 1, -1, 1) if kind == 1 else (1, 1, 1, -1)
        return only(known(torch.tensor(bits).view(shape)))
    parts = [draw(formulas(queries, keys, depth - 1)) for _ in range(2)]
    if kind == 3:
        return negated(parts[0])
    return both(*parts) if kind == 4 else either(*parts)


def compare(sign: str, rows: list[int], columns: list[int]) -> Compare:
    q, k = torch.tensor(rows).view(1, 1, -1, 1), torch.tensor(columns).view(1, 1, 1, -1)
    return Compare(sign, known(q), known(k))


@given(st.data(), KEYS, KEYS)
def test_intervals_are_the_formula(data, queries, keys):
    formula = data.draw(formulas(queries, keys))
    found = intervals(formula, keys)
    if found is None:
        return
    assert isinstance(found, KnownIntervals)
    wanted = dense(formula, queries, keys)
    assert torch.equal(pairs(found, queries, keys), wanted)


@given(st.data(), KEYS, KEYS)
def test_connectives_keep_their_meaning(data, queries, keys):
    """What both, either and negated simplify is the same."""
    a, b = (data.draw(formulas(queries, keys)) for _ in range(2))
    x, y = dense(a, queries, keys), dense(b, queries, keys)
    assert torch.equal(dense(both(a, b), queries, keys), x & y)
    assert torch.equal(dense(either(a, b), queries, keys), x | y)
    assert torch.equal(dense(negated(a), queries, keys), ~x)


@st.composite
def several(draw, rows: int, keys: int) -> KnownIntervals:
    """Disjoint intervals, up to two per row."""
    lo, hi = [], []
    for _ in range(rows):
        ends = sorted(draw(st.sets(st.integers(0, keys), min_size=4, max_size=4)))
        lo.append([ends[0], ends[2]])
        hi.append([ends[1], ends[3]])
    return KnownIntervals(torch.tensor([lo]), torch.tensor([hi]))


@given(st.data(), st.integers(1, 4), st.integers(4, 12))
def test_sets_of_intervals(data, rows, keys):
    a, b = (data.draw(several(rows, keys)) for _ in range(2))
    x, y = (pairs(z, rows, keys) for z in (a, b))
    for found, wanted in (
        (intersection(a, b, keys), x & y),
        (union(a, b, keys), x | y),
        (complement(a, keys), ~x),
    ):
        if found is not None:
            assert torch.equal(pairs(found, rows, keys), wanted)


def test_unknown_unions_have_to_start_or_end_alike():
    keys = 8
    unknown = known(torch.tensor(3).view(1, 1, 1, 1)).__class__(
        torch.empty(1, 1, 4, 1, device="meta", dtype=torch.int64), target=torch.neg
    )
    zero, end = (known(torch.tensor([[[[n]]]])) for n in (0, keys))
    first, last = Bounds(zero, unknown), Bounds(unknown, end)
    assert isinstance(union(first, first, keys), Bounds)
    assert isinstance(union(last, last, keys), Bounds)
    assert union(first, last, keys) is None
    middle = KnownIntervals(torch.tensor([[[2]]]), torch.tensor([[[5]]]))
    assert union(first, middle, keys) is None
    two = KnownIntervals(torch.tensor([[[0, 4]]]), torch.tensor([[[2, 6]]]))
    assert union(first, two, keys) is None
    assert intersection(first, two, keys) is None
    nothing = KnownIntervals(torch.tensor([[[keys]]]), torch.tensor([[[keys]]]))
    assert union(first, nothing, keys) is first


def test_names():
    i = torch.arange(20).view(1, -1, 1)

    def name(lo, hi, keys=20):
        return key_ranges_text(
            (i * 0 + lo).clamp(0), (i * 0 + hi).clamp(max=keys), 20, keys
        )

    assert name(0, i + 1) == "causal"
    assert name(0, i + 3) == "causal, shifted by 2"
    assert name(i - 3, i + 1) == "causal, window 4"
    assert name(i - 3, i + 4) == "window of 3 to each side"
    assert name(i - 3, i + 3) == "window of 3 back and 2 ahead"
    assert name(i // 4 * 4, i + 1) == "causal, chunks of 4"
    assert name(i // 4 * 4, i // 4 * 4 + 4) == "chunks of 4"
    assert name(i - 3, 20) == "keys from 3 back on"
    assert name(i // 2, i + 1) == "key ranges"
    assert name(0, i % 3) == "key ranges"
    assert name(0, torch.where(i == 3, 20, i + 1)) == "key ranges"
