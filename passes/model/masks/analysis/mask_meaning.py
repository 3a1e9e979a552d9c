"""Turn the formula of a mask into key ranges, segment ids, and what neither says.

k <= q & k > q - 8 & document[q] == document[k] & attention_mask[k]
  ->  key ranges [q - 7, q + 1), ids of documents and padding, no bias
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ....graph.nodes import reached
from .cases import CaseReader
from .distances import Added, DistanceReader, MaskParts, may_hide, take_apart
from .documents import can_be_ids, ids, same_tokens, within_documents
from .formula import Compare, Formula, Only, conjunction
from .intervals import (
    Bounds,
    Intervals,
    KnownIntervals,
    intervals,
    joined,
    key_ranges_text,
)
from .mask_program import MaskProgram, Unreadable
from .sums import NoForm
from .vectors import Vector, VectorReader, call, require_small
from .views import View, operands_of, root_view

aten = torch.ops.aten


@dataclass(frozen=True)
class MaskMeaning:
    """Key ranges, segment ids and biases that a mask was read as.

    key_ranges: per row; None if all keys are within. ids: of rows and of columns.
    is_dense: whether the model's own mask has to be added, too, for what neither says.
    added: a value that `distances` writes.
    """

    text: str
    key_ranges: Intervals | None = None
    ids: tuple[Vector, Vector] | None = None
    is_dense: bool = False
    added: Added | None = None
    distances: DistanceReader | None = None
    is_causal: bool = False

    @property
    def hides_nothing(self) -> bool:
        """True if there might as well be no mask."""
        fields = (self.key_ranges, self.ids, self.added)
        return not (self.is_causal or self.is_dense) and all(x is None for x in fields)


def read_mask(
    program: MaskProgram,
    meanings: str,
    sizes: tuple[int, int, int],
    any_length: bool = False,
    sinks: bool = False,
) -> MaskMeaning:
    """Read the result of a program as key ranges, segment ids and biases.

    meanings: those of its last dimensions, "BHQK", or "BQK" where q has no heads.
    sizes: the batch, and the numbers of queries and of keys. any_length: whether what
    is read has to hold for the first tokens alone, however many. sinks: whether every
    row has a sink, which takes all weight where the keys are hidden by the lowest
    finite number.

    Raises: Unreadable, if a part of it has to be computed for all pairs at once.
    """
    vectors = VectorReader(program, sizes[0] * (sizes[1] + sizes[2]))
    root = root_view(program.result, meanings)
    reading = _read(root, vectors, sizes, any_length, sinks)
    if reading.is_dense:
        _require_pairs(root, vectors)
    return reading


def _read(
    root: View,
    vectors: VectorReader,
    sizes: tuple[int, int, int],
    any_length: bool,
    sinks: bool,
) -> MaskMeaning:
    _, queries, keys = sizes
    dense = MaskMeaning(dense_text(root.value), is_dense=True)
    reader = CaseReader(vectors)
    try:
        parts = _parts(root, reader)
        distances = DistanceReader(reader, queries, keys)
        if parts.added is not None:
            distances.check(parts.added)
    except (NoForm, Unreadable):
        return dense
    formula = within_documents(parts.visible, vectors)
    reading = _split(formula, vectors, queries, keys)
    if (parts.forgiving and not sinks) and not (
        _sees_a_key(reading, formula, vectors, queries, keys)
        and not (any_length and _sees_only_later(reading.key_ranges))
        and not (parts.added and may_hide(parts.added, vectors.program.module))
    ):
        return dense
    if parts.added is not None:
        if reading.is_dense:  # pairs are held in any case
            return dense
        by = "distance" if parts.added.is_by_distance else "key"
        text = ", ".join(x for x in (reading.text, f"bias by {by}") if x)
        return replace(reading, text=text, added=parts.added, distances=distances)
    if reading.is_dense:
        words = [x for x in (reading.text, dense.text) if x]
        reading = replace(reading, text=", ".join(words))
    return reading


def _require_pairs(root: View, vectors: VectorReader) -> None:
    """Raise Unreadable if a call computes several pairs of a mask at once."""
    views = {root.key: root}

    def read_by(key: Any) -> list[Any]:
        view = views[key]
        if not view.is_pairwise:
            require_small(view.node, vectors.tokens)
            return []
        read, original = [], vectors.original(view)
        if original is not None:
            read = [original]
        elif view.node.op == "call_function" and view.node.all_input_nodes:
            read = [*operands_of(view).values()]
        views.update({x.key: x for x in read})
        return [x.key for x in read]

    reached([root.key], read_by)


def _parts(root: View, reader: CaseReader) -> MaskParts:
    """Split a mask into the keys that it hides and what it adds.

    A mask that hides by the lowest finite number is forgiving.
    """
    if root.dtype == torch.bool:
        return MaskParts(reader.formula(root))
    return take_apart(root, reader)


def _split(
    formula: Formula, vectors: VectorReader, queries: int, keys: int
) -> MaskMeaning:
    constant_intervals: list[tuple[Formula, KnownIntervals]] = []
    bounds: list[Intervals] = []
    equalities: list[Compare] = []
    hidden: list[Vector] = []
    rest: list[Formula] = []
    for part in conjunction(formula):
        part_intervals = intervals(part, keys)
        if isinstance(part_intervals, KnownIntervals):
            constant_intervals.append((part, part_intervals))
        elif part_intervals is not None:
            bounds.append(part_intervals)
        elif isinstance(part, Compare) and can_be_ids(part):
            equalities.append(part)
        elif (column := _column(part)) is not None:
            hidden.append(column)
        else:
            rest.append(part)
    key_ranges = joined([x for _, x in constant_intervals], keys)
    if not isinstance(key_ranges, KnownIntervals) or not key_ranges.is_single:
        key_ranges = joined([x for _, x in constant_intervals if x.is_single], keys)
        rest += [part for part, x in constant_intervals if not x.is_single]
    assert isinstance(key_ranges, KnownIntervals), (
        "single intervals meet in single ones"
    )
    nothing_hidden = bool(((key_ranges.lo == 0) & (key_ranges.hi == keys)).all())
    result: Intervals | None = None
    if bounds or not nothing_hidden:
        result = joined([key_ranges, *bounds], keys)
        assert result is not None, "an interval meets an interval in one"
    visible = (
        reduce(partial(call, aten.logical_and.default), hidden) if hidden else None
    )
    words = []
    if isinstance(result, KnownIntervals):
        words.append(key_ranges_text(result.lo, result.hi, queries, keys))
    elif result is not None:
        words.append("key ranges from data")
    for equality in equalities:
        same = same_tokens(equality, vectors) is not None
        words.append("same document" if same else "equal ids")
    if hidden:
        words.append("key padding")
    return MaskMeaning(
        ", ".join(dict.fromkeys(words)),
        result,
        ids(equalities, visible) if equalities or hidden else None,
        is_dense=bool(rest),
        is_causal=(
            isinstance(result, KnownIntervals)
            and not (equalities or hidden or rest)
            and queries == keys
            and not bool(result.lo.any())
            and torch.equal(result.hi.flatten(), torch.arange(1, queries + 1))
        ),
    )


def _column(part: Formula) -> Vector | None:
    """Return the vector of a formula of keys only, alike for all heads; else None."""
    if not isinstance(part, Only) or part.vector.is_rows:
        return None
    return None if "H" in part.vector.meanings else part.vector


def _sees_a_key(
    reading: MaskMeaning,
    formula: Formula,
    vectors: VectorReader,
    queries: int,
    keys: int,
) -> bool:
    """Tell whether it is proved that every row sees a key."""
    key_ranges = reading.key_ranges
    if reading.is_dense or isinstance(key_ranges, Bounds):
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


def _sees_only_later(key_ranges: Intervals | None) -> bool:
    """Tell whether a row may see none of the keys up to its own.

    At a shorter length these may be all the keys that there are.
    """
    if not isinstance(key_ranges, KnownIntervals):
        return key_ranges is not None
    return bool((key_ranges.lo[..., 0] > torch.arange(key_ranges.lo.shape[1])).any())


def dense_text(value: Tensor) -> str:
    """Name a mask that is held for all pairs, by its dtype and shape."""
    return f"dense {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
