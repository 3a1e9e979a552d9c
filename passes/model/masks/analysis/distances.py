"""Biases that depend on the distance or on the key: T5's buckets, ALiBi's slopes.

    add(permute(embedding(table, bucket(k - q))), where(k <= q, 0, -inf))
      ->  causal, and a bias of distances [1, H, Sq + Sk - 1]

A mask that has no formula is taken apart: into a formula of the keys that it hides, and
a value that is added to the scores. If the added value is computed from differences of
positions, and from nothing else that varies with the query or the key, then one row of
all distances says all of it: the model's own calls are written on that row instead of
on the pairs. Where the pairs are known, as those of a buffer are, their values are
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from .cases import CaseReader, Cases
from .constant_masks import formula_of
from .formula import EVERYWHERE, NOWHERE, Formula, both, either, negated
from .mask_program import Unreadable
from .mask_writer import MaskWriter
from .sums import NoForm, RowColumnSum
from .vectors import Vector, require_small
from .views import MEANINGS, MaskAxis, View, operand, operands_of, rearranged

aten = torch.ops.aten
_HIDES = -1e30  # no score makes up for it
_EXACT = 2**24  # integers below it are exact in float32


@dataclass(frozen=True)
class Added:
    """A value that is added to scores, converted to these dtypes one by one."""

    view: View
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def is_by_distance(self) -> bool:
        """True if it varies with the query; else the key decides."""
        return "Q" in self.view.meanings

    def to(self, dtype: torch.dtype) -> Added:
        """Return the value converted once more, where that changes it."""
        last = (self.view.dtype, *self.dtypes)[-1]
        return self if last == dtype else Added(self.view, (*self.dtypes, dtype))


@dataclass(frozen=True)
class MaskParts:
    """Parts of a mask: the keys that it hides, and what it adds to the scores.

    visible: where keys are not hidden. forgiving: whether a row that sees no key sees
    all. added: a value that is added to the scores of the visible keys, if there is
    one.
    """

    visible: Formula
    forgiving: bool = False
    added: Added | None = None

    def under(self, condition: Formula, other: MaskParts) -> MaskParts:
        """Hide keys also where `condition` is false.

        The result forgives if `other`, the parts of what hides them, forgives.
        """
        forgiving = self.forgiving or other.forgiving
        return MaskParts(both(condition, self.visible), forgiving, self.added)

    def to(self, dtype: torch.dtype) -> MaskParts:
        """Convert the added value to another dtype."""
        if self.added is None:
            return self
        return MaskParts(self.visible, self.forgiving, self.added.to(dtype))


def may_hide(added: Added, module: fx.GraphModule) -> bool:
    """Tell whether a value has numbers that hide; known pairs are read as such."""
    made = {added.view.node}
    if added.view.node.op == "get_attr" and added.view.is_pairwise:
        return False
    for node in reversed(module.graph.nodes):
        made.update(node.all_input_nodes if node in made else ())
    numbers: list[Any] = [y for x in made for y in (*x.args, *x.kwargs.values())]
    constants = [getattr(module, str(x.target)) for x in made if x.op == "get_attr"]
    known = all(type(x) is Tensor for x in constants)  # else they have no value yet
    numbers += [x.abs().max().item() for x in constants if known and x.numel()]
    numbers = [abs(x) for x in numbers if isinstance(x, int | float)]
    return not known or max(numbers, default=0) >= -_HIDES


def visible_where(cases: Cases) -> MaskParts:
    """Read cases of zeros and of numbers that hide as parts of a mask.

    Raises: NoForm, if there are other numbers.
    """
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
    return MaskParts(either(*visible), forgiving)


def take_apart(view: View, reader: CaseReader) -> MaskParts:
    """Split a mask of numbers into what hides keys and what is added."""
    try:
        return visible_where(reader.cases(view))
    except (NoForm, Unreadable):
        pass
    original = rearranged(view)
    if original is not None:
        return take_apart(original, reader)
    node = view.node
    if node.op == "get_attr" and view.is_pairwise:
        return _of_constant(view, reader.vectors.value(view))
    if node.target is aten._to_copy.default:
        (source,) = node.all_input_nodes
        if source.meta["val"].dtype != torch.bool:  # which is 0 and 1 as a number
            return take_apart(operand(view, source), reader).to(view.dtype)
    if node.target is aten.add.Tensor and not node.kwargs:
        terms = [operand(view, x) for x in node.args if isinstance(x, fx.Node)]
        sides = [take_apart(x, reader) for x in terms]
        plain = [x for x in sides if x.added is None]
        if len(sides) == 2 and plain:
            other_side = sides[sides[0] is plain[0]]
            return other_side.to(view.dtype).under(plain[0].visible, plain[0])
    if node.target is aten.where.self:
        return _chosen(view, reader)
    return MaskParts(EVERYWHERE, added=Added(view))


def _of_constant(view: View, value: Tensor) -> MaskParts:
    """Split known pairs: where they hide, if that is a formula, and the rest."""
    shown = value > _HIDES
    alike = bool((shown == shown[:, :1]).all()) and not bool(value.isnan().any())
    visible = formula_of(shown[:, :1]) if alike else None
    if visible is None:
        return MaskParts(EVERYWHERE, added=Added(view))
    forgiving = bool((~shown & value.isfinite()).any())
    return MaskParts(visible, forgiving, Added(view))


def _chosen(view: View, reader: CaseReader) -> MaskParts:
    """Split a call of where, one side of which hides keys."""
    condition, *sides = (operand(view, x) for x in view.node.all_input_nodes)
    if len(sides) == 2:
        where = reader.formula(condition)
        a, b = (take_apart(x, reader) for x in sides)
        for shown, hidden, visible in ((a, b, where), (b, a, negated(where))):
            if hidden.visible == NOWHERE and hidden.added is None:
                return shown.to(view.dtype).under(visible, hidden)
    return MaskParts(EVERYWHERE, added=Added(view))


class DistanceReader:
    """Proves that values are functions of the distance, and writes them as such."""

    def __init__(self, reader: CaseReader, queries: int, keys: int) -> None:
        self.reader, self.queries, self.keys = reader, queries, keys
        self._distances: dict[Any, Tensor | None] = {}

    def check(self, added: Added) -> None:
        """Raise NoForm or Unreadable unless it can be written by distance or key."""
        if added.is_by_distance:
            self._check(added.view)
        else:
            self.reader.vectors.read(added.view)

    def write(self, writer: MaskWriter, added: Added) -> fx.Node:
        """Write a value that was checked as [B or 1, H or 1, Sq + Sk - 1 or Sk]."""
        call, view = writer.call, added.view
        if added.is_by_distance:
            axes = tuple(MaskAxis(meaning) for meaning in MEANINGS)
            value = self._value(writer, view)
            value = writer.arranged(value, view, View(view.node, axes))
        else:
            value = writer.vector(self.reader.vectors.read(view))
            while value.meta["example_value"].ndim < len(MEANINGS):
                value = call(aten.unsqueeze.default, value, 0)
            shape = value.meta["example_value"].shape
            keys = writer.size(self.keys)
            value = call(aten.expand.default, value, [*shape[:3], keys])
        value = call(aten.squeeze.dim, value, MEANINGS.index("Q"))
        for dtype in added.dtypes:
            value = call(aten._to_copy.default, value, dtype=dtype)
        return value

    def _check(self, view: View) -> None:
        if not view.meanings & {"Q", "K"}:
            require_small(view.node, self.reader.vectors.tokens)
            if view.is_cut:
                raise NoForm(f"{view.node.name} is cut")
            return
        if not view.is_pairwise:
            raise NoForm(f"{view.node.name} varies with queries or keys alone")
        other_axes = (a for a in view.axes if a.meaning not in {"Q", "K"})
        if any(a.positions is not None for a in other_axes):
            raise NoForm(f"{view.node.name} is cut")
        if self._numbers(view) is not None:
            return
        if view.node.op == "get_attr" and self._constant(view) is None:
            raise NoForm(f"{view.node.name} varies with more than the distance")
        original = rearranged(view)
        if original is not None:
            sizes = original.value.shape
            pairs = zip(original.axes, sizes, strict=True)
            if any(n > 1 and not a.meaning for a, n in pairs):
                raise NoForm(f"{view.node.name} picks from another dimension")
            self._check(original)
        elif view.node.target is not aten.full.default and view.node.op != "get_attr":
            for operand_view in operands_of(view).values():
                self._check(operand_view)

    def _numbers(self, view: View) -> Tensor | None:
        """Return a difference of positions at all distances; None if a view is none."""
        if view.key not in self._distances:
            self._distances[view.key] = self._new_numbers(view)
        return self._distances[view.key]

    def _new_numbers(self, view: View) -> Tensor | None:
        if view.dtype == torch.bool:
            return None
        total = self._sum(view)
        if total is None or total.rows.value is None or total.columns.value is None:
            return None
        rows, columns = total.rows.value, total.columns.value
        if rows.numel() != self.queries or columns.numel() != self.keys:
            return None
        rows, columns = rows.flatten(), columns.flatten()
        steps = torch.cat([columns.diff(), -rows.diff()])
        if not bool((steps == steps[:1]).all()):
            return None
        ahead = rows[0] + columns  # of the first row
        past = rows[1:].flip(0) + columns[0]
        return torch.cat([past, ahead])

    def _constant(self, view: View) -> Tensor | None:
        """Return known pairs at all distances, [B or 1, H or 1, 1, n].

        None if pairs of one distance differ.
        """
        value = self.reader.vectors.value(view)
        if value.shape[2:] != (self.queries, self.keys):
            return None
        if not torch.equal(value[..., 1:, 1:], value[..., :-1, :-1]):
            return None
        past = value[..., 1:, :1].flip(2).transpose(2, 3)
        return torch.cat([past, value[..., :1, :]], 3)

    def _sum(self, view: View) -> RowColumnSum | None:
        """Read a view as a sum of a part of the query and one of the key."""
        node = view.node
        try:
            cases = self.reader.read(view)
        except (NoForm, Unreadable):
            cases = ()
        if isinstance(cases, tuple) and len(cases) == 1:
            (case,) = cases
            if case.where == EVERYWHERE and isinstance(case.number, RowColumnSum):
                return case.number
        if node.target is not aten.sub.Tensor or node.kwargs:
            return None
        if not view.dtype.is_floating_point or len(node.all_input_nodes) != 2:
            return None
        try:
            a, b = (
                self.reader.vectors.read(operand(view, x)) for x in node.all_input_nodes
            )
        except Unreadable:
            return None
        for x in (a, b):  # floats of whole numbers are as good as integers
            if x.value is None or not bool(
                (x.value == x.value.round()).all() and (x.value.abs() < _EXACT).all()
            ):
                return None
        assert a.value is not None and b.value is not None
        minus = Vector(b.like, -b.value)
        return RowColumnSum(a, minus) if a.is_rows else RowColumnSum(minus, a)

    def _value(self, writer: MaskWriter, view: View) -> fx.Node:
        """Write a checked view of one query, whose keys are at all distances."""
        if not view.is_pairwise:
            return writer.copy(view.node)
        numbers = self._numbers(view)
        shape = [-1 if axis.meaning == "K" else 1 for axis in view.axes]
        if numbers is not None:
            return writer.distances(numbers.to(view.dtype).view(shape))
        original = rearranged(view)
        if original is not None:
            return writer.arranged(self._value(writer, original), original, view)
        node = view.node
        if node.op == "get_attr":
            known_pairs = self._constant(view)
            assert known_pairs is not None, "it was checked"
            axes = tuple(MaskAxis(meaning) for meaning in MEANINGS)
            return writer.arranged(writer.constant(known_pairs), View(node, axes), view)
        if node.target is aten.full.default:
            one = [1] * len(view.axes)
            return writer.call(aten.full.default, one, node.args[1], **node.kwargs)
        replacements = {
            x: self._value(writer, operand_view)
            for x, operand_view in operands_of(view).items()
        }
        return writer.copy_call(node, replacements)
