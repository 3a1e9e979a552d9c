"""The axes of the operands of a call, and results that are sums over tokens."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ..graph.sequence_tokens import TokenAxis


class TokenSum:
    """The mark of a value that is a sum over tokens.

    A part of the value is a sum over some of them.
    """

    def __repr__(self) -> str:
        return "SUM"


SUM = TokenSum()

Operands = dict[fx.Node, TokenAxis]  # operands without an axis are used whole


def value_of(node: Any) -> Any:
    """Return the fake value of a node of a graph of aten; anything else as it is."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node
