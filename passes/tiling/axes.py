"""Where the tokens of a rank lie in a value, and in the operands of calls.

Shapes of one value, n = 6 tokens:

    [2, 6, 5]   Axis(1)            [12, 5]    Axis(0, outer=2)     both flattened
    [6, 2, 5]   Axis(0)            [12, 5]    Axis(0, inner=2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx


@dataclass(frozen=True)
class Axis:
    """Dimension `dim` has outer * n * inner elements, for n tokens."""

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, tokens: int) -> int:
        """Elements of the dimension, for so many tokens."""
        return self.outer * tokens * self.inner

    def moved(self, dim: int) -> Axis:
        """The same tokens in another dimension."""
        return Axis(dim, self.outer, self.inner)


class Sum:
    """The value is a sum over tokens, and a part of it is one over some of them."""

    def __repr__(self) -> str:
        return "SUM"


SUM = Sum()

Operands = dict[fx.Node, Axis]  # those without an axis are used whole


def value_of(node: Any) -> Any:
    """The fake value of a node of a graph of aten."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node
