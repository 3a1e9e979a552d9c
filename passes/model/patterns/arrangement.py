"""Reorder the dimensions of a tensor by calls that are inserted later.

A move is a function of torch and its further arguments. Moves are read off labels first
and inserted later, when it is clear that everything else fits too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_symbol

from ...graph.nodes import fake_value, insert_call

DimLabels = tuple[str, ...]
Move = tuple[Callable[..., Tensor], tuple[Any, ...]]


@dataclass(frozen=True)
class Regrouping:
    """A view of the leading dimensions `before` as the dimensions `after`, with sizes.

    [B * H, S, S] -> [B, H, S, S]: elements keep their order.
    """

    before: DimLabels
    sizes_before: tuple[int, ...]
    after: DimLabels
    sizes: tuple[int, ...]

    @property
    def back(self) -> Regrouping:
        """Inverse of the regrouping."""
        return Regrouping(self.after, self.sizes, self.before, self.sizes_before)


@dataclass(frozen=True)
class Arranged:
    """A node of the graph, and the moves that bring it to the order of `labels`."""

    node: fx.Node
    labels: DimLabels
    moves: tuple[Move, ...] = ()

    def ordered(self, labels: Sequence[str]) -> Arranged | None:
        """Bring the dimensions into this order; missing labels become dimensions of 1.

        None if the node has other labels.
        """
        if {*self.labels} - {*labels}:
            return None
        own_labels = [x for x in labels if x in self.labels]
        moves: list[Move] = []
        order = tuple(self.labels.index(x) for x in own_labels)
        if order != tuple(range(len(order))):
            moves.append((torch.permute, (order,)))
        for place, label in enumerate(labels):
            if label not in self.labels:
                moves.append((torch.unsqueeze, (place,)))
        return Arranged(self.node, tuple(labels), (*self.moves, *moves))

    def regrouped(self, how: Regrouping, keep_ones: bool = False) -> Arranged:
        """Regroup the leading dimensions, which are all but the last two.

        keep_ones: if all leading dimensions have size 1, they are not repeated.
        """
        rest = self.labels[len(how.before) :]
        assert self.labels[: len(how.before)] == how.before, "in this order"
        moves: list[Move] = []
        shape = tuple(self.value.shape)[: len(how.before)]
        sizes = how.sizes
        if keep_ones and all(not is_symbol(n) and n == 1 for n in shape):
            sizes = (1,) * len(sizes)
        elif shape != how.sizes_before:
            moves.append((torch.Tensor.expand, (*how.sizes_before, *(-1,) * len(rest))))
        if not how.before:
            moves.append((torch.unsqueeze, (0,)))
        elif len(how.before) > 1:
            moves.append((torch.flatten, (0, len(how.before) - 1)))
        if not how.after:
            moves.append((torch.squeeze, (0,)))
        elif len(how.after) > 1:
            moves.append((torch.unflatten, (0, sizes)))
        return Arranged(self.node, (*how.after, *rest), (*self.moves, *moves))

    @property
    def value(self) -> Tensor:
        """Fake tensor after all moves."""
        value: Tensor = fake_value(self.node)
        for function, rest in self.moves:
            value = function(value, *rest)
        return value

    def insert(self, like: fx.Node) -> fx.Node:
        """Insert all moves at the insertion point, and return the last node."""
        node = self.node
        for function, rest in self.moves:
            value = function(fake_value(node), *rest)
            args = (node, *rest)
            node = insert_call(like.graph, function, args, like=like, value=value)
        return node


def regrouping(
    labels: DimLabels, before: Sequence[int], after: Sequence[int]
) -> Regrouping | None:
    """Return how a tensor of these labels and sizes is viewed as one of other sizes.

    None unless its last two dimensions stay, or where a leading one is a symbol.
    """
    if len(after) < 2 or tuple(before[-2:]) != tuple(after[-2:]):
        return None
    if any(is_symbol(n) for n in (*before[:-2], *after[:-2])):
        return None
    new = tuple(f"{'.'.join(labels[:-2])}/{n}" for n in range(len(after) - 2))
    return Regrouping(labels[:-2], tuple(before[:-2]), new, tuple(after[:-2]))
