"""From the formula of a mask to key ranges, segment ids, and what neither of them says.

k <= q & k > q - 8 & document[q] == document[k] & attention_mask[k]
  ->  key ranges [q - 7, q + 1), ids of documents and padding, no bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce

import torch

from cpcompile.passes.masks.cases import CaseReader, Cases
from cpcompile.passes.masks.documents import same_tokens, within_documents
from cpcompile.passes.masks.formula import (
    Compare,
    Formula,
    Only,
    both,
    conjunction,
    either,
)
from cpcompile.passes.masks.key_ranges import (
    Bounds,
    Intervals,
    Known,
    intervals,
    joined,
)
from cpcompile.passes.masks.program import MaskProgram
from cpcompile.passes.masks.segment_ids import can_be_ids, ids
from cpcompile.passes.masks.sums import NoForm
from cpcompile.passes.masks.text import dense_text, key_ranges_text
from cpcompile.passes.masks.vectors import Vector, VectorReader, call
from cpcompile.passes.masks.views import View, root_view

aten = torch.ops.aten
_HIDES = -1e30  # no score makes up for it


@dataclass(frozen=True)
class Reading:
    """What a mask says.

    key_ranges: per row; None if all keys are within. ids: of rows and columns. rest: a
        bool
    bias as a formula. bias: the whole mask, where it is no formula; cases: the same as
    numbers that formulas choose among, if it can be.
    """

    text: str
    key_ranges: Intervals | None = None
    ids: tuple[Vector, Vector] | None = None
    rest: Formula | None = None
    bias: View | None = None
    cases: Cases | None = None
    is_causal: bool = False

    @property
    def hides_nothing(self) -> bool:
        """Whether there might as well be no mask."""
        fields = (self.key_ranges, self.ids, self.rest, self.bias)
        return not self.is_causal and all(x is None for x in fields)


def read_mask(
    program: MaskProgram, meanings: str, sizes: tuple[int, int, int]
) -> Reading:
    """The reading of a program's result.

    meanings: of its last dimensions, "BHQK", or "BQK" where q has no heads. sizes: the
    batch, and the numbers of queries and of keys.

    Raises: Unreadable, if a part of it has to be computed for all pairs at once.
    """
    batch, queries, keys = sizes
    vectors = VectorReader(program, batch * (queries + keys))
    root = root_view(program.result, meanings)
    dense = Reading(dense_text(root.value), bias=root)
    try:
        reader = CaseReader(vectors)
        if root.dtype != torch.bool:
            dense = replace(dense, cases=reader.cases(root))
        formula, forgiving = _formula(root, reader)
    except NoForm:
        return dense
    formula = within_documents(formula, vectors)
    reading = _split(formula, vectors, queries, keys)
    if forgiving and not _sees_a_key(reading, formula, vectors, queries, keys):
        return dense
    if reading.rest is not None:
        words = [x for x in (reading.text, dense.text) if x]
        reading = replace(reading, text=", ".join(words))
    return reading


def _formula(root: View, reader: CaseReader) -> tuple[Formula, bool]:
    """The formula of a mask, and whether a row that sees no key sees all of them.

    So it is where keys are hidden by the lowest finite number. Raises: NoForm.
    """
    if root.dtype == torch.bool:
        return reader.formula(root), False
    cases: Cases = reader.cases(root)
    visible: list[Formula] = []
    forgiving = False
    for case in cases:
        number = case.number.constant if isinstance(case.number, Vector) else None
        if number is None or not (number == 0 or number <= _HIDES):
            raise NoForm("a mask that is not of zeros and of what hides")
        if number == 0:
            visible.append(case.where)
        elif number != -torch.inf:
            forgiving = True
    return either(*visible), forgiving


def _split(formula: Formula, vectors: VectorReader, queries: int, keys: int) -> Reading:
    known: list[tuple[Formula, Known]] = []
    bounds: list[Intervals] = []
    equalities: list[Compare] = []
    hidden: list[Vector] = []
    rest: list[Formula] = []
    for part in conjunction(formula):
        found = intervals(part, keys)
        if isinstance(found, Known):
            known.append((part, found))
        elif found is not None:
            bounds.append(found)
        elif isinstance(part, Compare) and can_be_ids(part):
            equalities.append(part)
        elif (column := _column(part)) is not None:
            hidden.append(column)
        else:
            rest.append(part)
    key_ranges = joined([x for _, x in known], keys)
    if not isinstance(key_ranges, Known) or not key_ranges.is_single:
        key_ranges = joined([x for _, x in known if x.is_single], keys)
        rest += [part for part, x in known if not x.is_single]
    assert isinstance(key_ranges, Known), "single intervals meet in single ones"
    nothing_hidden = bool(((key_ranges.lo == 0) & (key_ranges.hi == keys)).all())
    result: Intervals | None = None
    if bounds or not nothing_hidden:
        result = joined([key_ranges, *bounds], keys)
        assert result is not None, "an interval meets an interval in one"
    visible = (
        reduce(partial(call, aten.logical_and.default), hidden) if hidden else None
    )
    words = []
    if isinstance(result, Known):
        words.append(key_ranges_text(result.lo, result.hi, queries, keys))
    elif result is not None:
        words.append("key ranges from data")
    for equality in equalities:
        same = same_tokens(equality, vectors) is not None
        words.append("same document" if same else "equal ids")
    if hidden:
        words.append("key padding")
    return Reading(
        ", ".join(dict.fromkeys(words)),
        result,
        ids(equalities, visible) if equalities or hidden else None,
        both(*rest) if rest else None,
        is_causal=(
            isinstance(result, Known)
            and not (equalities or hidden or rest)
            and queries == keys
            and not bool(result.lo.any())
            and torch.equal(result.hi.flatten(), torch.arange(1, queries + 1))
        ),
    )


def _column(part: Formula) -> Vector | None:
    """A formula of keys only, alike for all heads."""
    if not isinstance(part, Only) or part.vector.is_rows:
        return None
    return None if "H" in part.vector.meanings else part.vector


def _sees_a_key(
    reading: Reading,
    formula: Formula,
    vectors: VectorReader,
    queries: int,
    keys: int,
) -> bool:
    """Whether it is proved that every row sees a key."""
    key_ranges = reading.key_ranges
    if reading.rest is not None or isinstance(key_ranges, Bounds):
        return False
    if reading.ids is None:
        return key_ranges is None or bool((key_ranges.lo < key_ranges.hi).all())
    if queries != keys:
        return False
    if key_ranges is not None:
        own = torch.arange(queries)[:, None]
        if not bool(((key_ranges.lo <= own) & (own < key_ranges.hi)).all()):
            return False
    # A row sees its own token, where ids come from comparing a value with itself.
    return all(
        intervals(part, keys) is not None
        or (
            isinstance(part, Compare)
            and part.sign == "=="
            and same_tokens(part, vectors) is not None
        )
        for part in conjunction(formula)
    )
