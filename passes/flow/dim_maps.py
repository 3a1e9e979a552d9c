"""Describe which dimensions of the operands and of the result of a call correspond.

    mm(x, w)         x (m, d)      w (d, n)   ->  (m, n), a sum over d
    add(x, bias)     x (0, 1)      bias (1)   ->  (0, 1)
    cat([x, y], 1)   x (0, 1)      y (0, 1)   ->  (0, 1), 1 moves
    view             x [2, 6, 5]              ->  [12, 5], in the same order

A call on some entries of a dimension gives these entries of the result, if all
operands with the dimension's label are cut alike. So one description answers both
questions, from operands to results and back. `dim_rules.py` has the calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from ..graph.nodes import expected_shape, value_of
from ..graph.sequence_tokens import TokenAxis


class TokenSum:
    """The mark of a value that is a sum over tokens.

    A part of the value is a sum over some of them.
    """

    def __repr__(self) -> str:
        return "SUM"


SUM = TokenSum()

Axes = dict[fx.Node, TokenAxis]  # operands without an axis are used whole
Labels = tuple[str, ...]
"""One per dimension; "" corresponds to nothing."""


@dataclass(frozen=True)
class DimMap:
    """The labels of the dimensions of a call.

    operands: those that have entries; others are used whole. A node may stand there
        more than once.
    result: of the result, or of each of several results. What no operand has is the
        same for every entry.
    sums: labels over which the result is a sum.
    moves: labels whose entries change their place or number: a cut has no meaning.
    is_view: whether elements keep their order and labels do not matter.
    draws: whether random numbers are drawn.
    """

    operands: tuple[tuple[fx.Node, Labels], ...]
    result: Labels = ()
    sums: frozenset[str] = frozenset()
    moves: frozenset[str] = frozenset()
    is_view: bool = False
    draws: bool = False

    @property
    def pairs(self) -> list[tuple[fx.Node, int, int]]:
        """Operands, each with a dimension and the dimension of the result that has it.

        A view has none.
        """
        return [
            (x, dim, out)
            for x, labels in self.operands
            for out, label in enumerate(self.result)
            for dim, own in enumerate(labels)
            if label and own == label
        ]

    def before(self, node: fx.Node, axis: TokenAxis, tokens: int) -> Axes | None:
        """Return the operands' axes of a call whose result has `axis`.

        None: the call is not token-wise, or not known to be.
        """
        if self.is_view:
            ((operand, _),) = self.operands
            source = _viewed(node, operand, axis, tokens)
            return None if source is None else {operand: source}
        label = self.result[axis.dim]
        if not label or label in self.moves:
            return None
        return self._axes(label, axis, tokens)

    def after(
        self, node: fx.Node, axes: Mapping[fx.Node, TokenAxis], tokens: int
    ) -> tuple[TokenAxis | TokenSum, Axes] | None:
        """Return the axes of the result and of all operands, from those that are known.

        None: the call is not token-wise, or not known to be, or what is known
        contradicts.
        """
        operand_axes = {x: axes[x] for x in node.all_input_nodes if x in axes}
        operand = next((x for x, _ in self.operands if x in operand_axes), None)
        if operand is None:
            return None
        axis, labels = operand_axes[operand], dict(self.operands)[operand]
        label = "" if self.is_view else labels[axis.dim]
        result: TokenAxis | TokenSum | None = None
        if self.is_view:
            result = _viewed(operand, node, axis, tokens)
        elif label and label in self.result:
            result = axis.moved(self.result.index(label))
        if isinstance(result, TokenAxis):
            operands = self.before(node, result, tokens)
        elif label in self.sums:
            result, operands = SUM, self._axes(label, axis, tokens)
        if result is None or operands is None:
            return None
        if any(operands.get(x) != at for x, at in operand_axes.items()):
            return None
        return result, operands

    def _axes(self, label: str, axis: TokenAxis, tokens: int) -> Axes | None:
        """Return the axes of all operands that have a label."""
        axes: dict[fx.Node, TokenAxis | None] = {}
        for operand, labels in self.operands:
            at = axis.moved(labels.index(label)) if label in labels else None
            if axes.setdefault(operand, at) != at:
                return None  # the same tensor, cut in one place and whole in another
            shape = expected_shape(value_of(operand))
            if at is not None and shape[at.dim] != at.size(tokens):
                return None
        return {x: at for x, at in axes.items() if at is not None}


def _viewed(
    source: fx.Node, target: fx.Node, axis: TokenAxis, tokens: int
) -> TokenAxis | None:
    shape, new = (expected_shape(value_of(x)) for x in (source, target))
    return regrouped(axis, shape, new, tokens)


def regrouped(
    axis: TokenAxis, shape: tuple[int, ...], new: tuple[int, ...], n: int
) -> TokenAxis | None:
    """Return where tokens are after a view of `shape` as `new`; None if torn apart."""
    before = math.prod(shape[: axis.dim]) * axis.outer
    if 0 in (before * n, *new):
        return None  # nothing has no order
    product = 1
    for dim, size in enumerate(new):
        if size != 1 and before % product == 0 and (product * size) % (before * n) == 0:
            return TokenAxis(dim, before // product, product * size // (before * n))
        product *= size
    return None
