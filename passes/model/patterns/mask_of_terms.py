"""Join what is added to scores and what hides some of them into one attention mask.

where(causal, scores, -inf)         ->  causal
scores.masked_fill(padding, -1e9)   ->  padding.to(float32) * FILLED
where(causal, scores, low) + bias   ->  masked_fill(0, ~causal, low) + bias
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from cpcompile.geometry.lengths import is_symbol
from cpcompile.ops.step.row_mask import filled_number

from ...graph.nodes import fake_value, insert_call
from .arrangement import Arranged
from .matched import Term

_Insert = Callable[..., fx.Node]
_Hidden = tuple[bool, fx.Node]  # whether a low number hides, or -inf; where


def mask_of_terms(
    terms: tuple[tuple[Term, Arranged], ...], dtype: torch.dtype, like: fx.Node
) -> fx.Node | None:
    """Insert a bias that is added to the scores, or a bool mask of what is visible.

    None if there is neither. A row all of whose keys are hidden by a low number gives
    the mean of its values, and so it does where FILLED is added, see
    Note [Rows of low numbers].
    """

    def insert(target: Any, *args: Any) -> fx.Node:
        values = [fake_value(x) for x in args]
        return insert_call(like.graph, target, args, like=like, value=target(*values))

    added: fx.Node | None = None
    hidden: list[_Hidden] = []
    visible: fx.Node | None = None
    for term, arranged in terms:
        node = arranged.insert(like)
        if term.kind == "add":
            if term.factor != 1:
                node = insert(torch.mul, node, term.factor)
            if any(low for low, _ in hidden):  # it is added to the low number too
                added, hidden = _hiding(added, hidden, dtype, insert), []
            added = node if added is None else insert(torch.add, added, node)
        elif term.kind == "show" and not term.low and len(terms) == 1:
            visible = node
        else:
            if term.kind == "show":
                node = insert(torch.logical_not, node)
            if hidden and hidden[-1][0] == term.low:
                node = insert(torch.logical_or, hidden.pop()[1], node)
            hidden.append((term.low, node))
    if visible is not None or not terms:
        return visible
    if added is None and len(hidden) == 1 and not hidden[0][0]:
        return insert(torch.logical_not, hidden[0][1])
    return _hiding(added, hidden, dtype, insert)


def _hiding(
    added: fx.Node | None,
    hidden: list[_Hidden],
    dtype: torch.dtype,
    insert: _Insert,
) -> fx.Node:
    """Insert what is added to the scores, with the numbers that hide filled in.

    Something is added, or a low number hides.
    """
    filled = filled_number(dtype)
    if added is not None and _has_lower(dtype, fake_value(added).dtype):
        added = insert(torch.Tensor.to, added, dtype)  # which has such low numbers
    for low, node in hidden:
        if added is None and low:
            numbers = insert(torch.Tensor.to, node, dtype)
            added = insert(torch.mul, numbers, filled)
            continue
        if added is None:
            added = insert(torch.Tensor.to, insert(torch.zeros_like, node), dtype)
        shapes = torch.broadcast_shapes(fake_value(added).shape, fake_value(node).shape)
        if fake_value(added).shape != shapes:
            sizes = [  # a symbol is a size of one of the two
                next(
                    insert(torch.Tensor.size, x, dim)
                    for x in (added, node)
                    if -dim <= fake_value(x).ndim and fake_value(x).shape[dim] == size
                )
                if is_symbol(size)
                else int(size)
                for dim, size in enumerate(shapes, -len(shapes))
            ]
            added = insert(torch.Tensor.expand, added, *sizes)
        number = filled if low else float("-inf")
        added = insert(torch.masked_fill, added, node, number)
    assert added is not None, "something is added or hides"
    return added


def _has_lower(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Tell whether a dtype has lower numbers than another floating-point dtype."""
    return other.is_floating_point and torch.finfo(dtype).min < torch.finfo(other).min
