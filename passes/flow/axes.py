"""The axes of the operands of a call, and results that are sums over tokens."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ..graph.sequence_tokens import Axis


class Sum:
    """The value is a sum over tokens, and a part of it is one over some of them."""

    def __repr__(self) -> str:
        return "SUM"


SUM = Sum()

Operands = dict[fx.Node, Axis]  # those without an axis are used whole


def value_of(node: Any) -> Any:
    """The fake value of a node of a graph of aten."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node
