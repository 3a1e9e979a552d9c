"""Read what the rules for calls on rows need to know of a call."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from cpcompile.geometry.lengths import is_symbol

from .calls import canonical_call
from .nodes import fake_value


class NotByRows(Exception):
    """Raised where the rows of tokens meet, or where nobody can tell."""


def given(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name; sizes are numbers."""
    return {name: number(x) for name, x in canonical_call(node).arguments.items()}


def number(x: Any) -> Any:
    """Return the int that x stands for if x is a node of a size without a symbol.

    Anything else is returned as it is.
    """
    value = fake_value(x)
    if not isinstance(x, fx.Node) or not isinstance(value, int | torch.SymInt):
        return x
    return x if is_symbol(value) else int(value)


def tensors_read(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a call without the sizes, some of which may be symbols."""
    sizes = (int, torch.SymInt)
    return [x for x in node.all_input_nodes if not isinstance(fake_value(x), sizes)]


def need(condition: object) -> None:
    """Raise NotByRows unless the condition holds."""
    if not condition:
        raise NotByRows


def same_columns(rows: fx.Node, index: fx.Node) -> None:
    """Raise NotByRows unless `index` has the sizes of `rows` after dimension 0.

    Positions are one number per row, so that their columns are equal.
    """
    need(fake_value(index).shape[1:] == fake_value(rows).shape[1:])
