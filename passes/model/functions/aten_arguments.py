"""Read the arguments of aten calls: dimensions, slices and constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...graph.nodes import where

aten = torch.ops.aten
# What a call fills its result with; an int is the index of the argument that says it.
CONSTANTS: dict[Any, Any] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.zeros.default: 0.0,
    aten.zeros_like.default: 0.0,
    aten.ones.default: 1.0,
    aten.ones_like.default: 1.0,
    aten.empty.memory_format: "empty",
    aten.empty_like.default: "empty",
    aten.new_zeros.default: 0.0,
    aten.new_ones.default: 1.0,
    aten.new_empty.default: "empty",
    aten.new_full.default: 2,
}
SAME_NUMBERS = (
    aten._to_copy.default,
    aten.clone.default,
    aten.expand.default,
    aten.view.default,
)
# Calls that read only the dtype and the device of a tensor.
BY_SHAPE = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
)


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a value; () if it is no tensor."""
    value = node.meta["val"]
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def at(node: fx.Node) -> str:
    """Name a call for the user: its aten name and the line that asked for it.

    "mul of File ..., line 12, in forward".
    """
    name = getattr(node.target, "_opname", str(node.target))
    return f"{name} of {where(node)}"


def dimension(node: fx.Node, place: int, ndim: int) -> int:
    """Return the argument `dim` of a call, counted from the front.

    place: its index among the positional arguments. The default is 0.
    """
    args: tuple[Any, ...] = node.args
    dim: Any = args[place] if len(args) > place else node.kwargs.get("dim", 0)
    return int(dim) % max(ndim, 1)


def sliced(source: fx.Node, arguments: tuple[Any, ...]) -> tuple[int, int, int, int]:
    """Return dimension, first row, row after the last, and step of a slice of `source`.

    arguments: dim, start, end, step of aten.slice, as far as they are given.
    """
    defaults: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = (*arguments, *defaults[len(arguments) :])
    dim %= len(shape_of(source))
    size = shape_of(source)[dim]
    start, stop = (
        max(0, min(size, n + size if n < 0 else n))
        for n in (start or 0, size if stop is None else stop)
    )
    return dim, start, max(start, stop), step


def fill_value(node: fx.Node) -> Any:
    """Return what a call of CONSTANTS fills its result with; "empty" for nothing."""
    fill = CONSTANTS[node.target]
    return node.args[fill] if isinstance(fill, int) else fill


def is_zero(node: fx.Node) -> bool:
    """Tell whether a value is made of zeros."""
    if node.op != "call_function":
        return False
    if node.target in SAME_NUMBERS:
        (source, *_) = node.all_input_nodes
        return is_zero(source)
    number = fill_value(node) if node.target in CONSTANTS else None
    return isinstance(number, int | float) and number == 0
