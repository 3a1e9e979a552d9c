"""Reads a pointwise program as a formula, or as numbers that formulas choose among.

    masked_fill(zeros, ~(k <= q), -inf)
      ->  0.0 where k <= q;  -inf where k > q

A number that varies with queries and keys at once is read as far as it is a sum of a
part of each, q - k for example, which a comparison takes apart again: q - k < w is
q - w < k. That holds for integers only.
"""

from __future__ import annotations

from typing import Any

import torch

from cpcompile.passes.mask_choices import (
    CONNECTIVES,
    Cases,
    Read,
    choice,
    combined,
    converted,
    is_pointwise,
    one,
    scalar,
    truth,
)
from cpcompile.passes.mask_formula import Dense, Formula, only
from cpcompile.passes.mask_program import Unreadable
from cpcompile.passes.mask_sums import NoForm, calculate, compared
from cpcompile.passes.mask_vectors import (
    FILLS,
    OVERWRITES,
    Vector,
    VectorReader,
    known,
    positions,
)
from cpcompile.passes.mask_views import View, look_through, operand, rearranged

aten = torch.ops.aten


class CaseReader:
    """Reads views of one program; `sizes` are the numbers of queries and keys."""

    def __init__(self, vectors: VectorReader) -> None:
        self.vectors = vectors
        self._read: dict[Any, Read] = {}

    def formula(self, view: View) -> Formula:
        """The formula of a bool view; Dense where it has none."""
        found = self.read(view)
        assert not isinstance(found, tuple), "a bool value is a formula"
        return found

    def cases(self, view: View) -> Cases:
        """The cases of a view of numbers. Raises: NoForm, Unreadable."""
        found = self.read(view)
        assert isinstance(found, tuple), "numbers are cases"
        return found

    def read(self, view: View) -> Read:
        """A formula if the view is bool, else cases; raises NoForm for numbers only."""
        if view.key not in self._read:
            self._read[view.key] = self._new(view)
        return self._read[view.key]

    def _new(self, view: View) -> Read:
        if not view.is_pairwise:
            return self._vector(view)
        through = self.vectors.gathered(view) or look_through(view)
        if through is not view:
            return self.read(through)
        try:
            return self._call(view)
        except (NoForm, Unreadable):
            if view.dtype != torch.bool:
                raise
            return Dense(view)

    def _vector(self, view: View) -> Read:
        """A vector; from data, it may tell what it is compared with or chosen."""
        try:
            vector = self.vectors.read(view)
        except Unreadable:  # a row of pairs
            return self._structure(view)
        is_bool = vector.dtype == torch.bool
        if vector.value is None and (vector.is_columns or not is_bool):
            try:
                found = self._structure(view)
            except (NoForm, Unreadable):
                return one(vector)
            if is_bool or all(
                isinstance(c.number, Vector) and c.number.constant is not None
                for c in found  # type: ignore[union-attr]
            ):
                return found
        return one(vector)

    def _structure(self, view: View) -> Read:
        """What the call says that computes a view."""
        while (behind := rearranged(view)) is not None:
            view = behind
        return self._call(view)

    def _call(self, view: View) -> Read:
        target, args, kwargs = view.node.target, view.node.args, view.node.kwargs
        if target in _TRIANGLES:
            return self._triangle(view, *args, **kwargs)  # type: ignore[arg-type]
        if target in FILLS:
            return one(_filled(view))
        if (
            target is aten.slice_scatter.default
            or target is aten.select_scatter.default
        ):
            return self._written(view, *args, **kwargs)  # type: ignore[arg-type]
        if target is aten.index.Tensor:
            raise NoForm("a look-up by pairs")
        if target in OVERWRITES:
            args = (args[1],)
            target = aten._to_copy.default
        if not is_pointwise(target):
            raise NoForm(f"{target} is not pointwise")
        operands = [
            self.read(operand(view, a)) if isinstance(a, torch.fx.Node) else a
            for a in args
        ]
        if target is aten.where.self:
            return choice(view.dtype, *operands)
        if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            x, mask, fill = operands
            return choice(view.dtype, mask, fill, x)
        if target is aten._to_copy.default:
            return converted(operands[0], view.dtype)
        rule = CONNECTIVES.get(target)
        if rule is not None and view.dtype == torch.bool:
            return rule(*map(truth, operands))
        return combined(view.dtype, target, operands, kwargs)

    def _triangle(self, view: View, x: Any, diagonal: int = 0) -> Read:
        """tril and triu are a choice by the positions of the last two dimensions."""
        i, j = (self._index(view, d) for d in (-2, -1))
        sign = (
            aten.ge.Tensor if view.node.target is aten.tril.default else aten.le.Tensor
        )
        inside = compared(sign, calculate(aten.add.Tensor, (i, diagonal)), j)
        return choice(view.dtype, inside, self.read(View(x, view.axes)), 0)

    def _index(self, view: View, dim: int) -> Vector:
        """The positions along a dimension, as a vector."""
        axis, size = view.axes[dim], view.value.shape[dim]
        if axis.positions is None:
            return positions(axis.meaning, size) if axis.meaning else scalar(0)
        whole = known(axis.positions)
        if not axis.meaning:
            return whole
        shape = [1, 1, 1, 1]
        shape["BHQK".index(axis.meaning)] = -1
        return known(axis.positions.view(shape))

    def _written(
        self, view: View, base: Any, source: Any, dim: int = 0, *cut: Any
    ) -> Read:
        """A part of `base` along a dimension was replaced by `source`."""
        dim %= view.value.ndim
        size = view.value.shape[dim]
        narrow = view.node.target is aten.select_scatter.default
        if narrow:
            kept = torch.tensor([cut[0] % size])
        else:
            kept = torch.arange(*slice(*_slice_of(*cut)).indices(size))
        if not len(kept):
            return self.read(View(base, view.axes))
        place = torch.zeros(size, dtype=torch.int64)
        place[kept] = torch.arange(len(kept))
        inside = torch.zeros(size, dtype=torch.bool)
        inside[kept] = True
        axis, at = view.axes[dim], self._index(view, dim)
        assert at.value is not None, "positions are known"
        chosen = only(known(inside[at.value]))
        moved = place[at.value.flatten()]
        axes = list(view.axes)
        if narrow:
            del axes[dim]
        elif len(kept) > 1:
            axes[dim] = type(axis)(axis.meaning, moved)
        else:
            axes[dim] = type(axis)()
        return choice(
            view.dtype,
            chosen,
            self.read(View(source, tuple(axes))),
            self.read(View(base, view.axes)),
        )


def _filled(view: View) -> Vector:
    """full, ones_like and the like: one value, whatever they take it from."""
    value = FILLS[view.node.target](view.node)
    if isinstance(value, torch.fx.Node):
        raise NoForm("filled with a tensor")
    return known(torch.full((1,) * len("BHQK"), value, dtype=view.dtype))


_TRIANGLES = (aten.tril.default, aten.triu.default)


def _slice_of(start: Any = None, end: Any = None, step: Any = 1) -> tuple[Any, ...]:
    """The last arguments of slice_scatter, as those of a slice."""
    return start, end, step
