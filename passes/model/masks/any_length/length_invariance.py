"""Check that calls compute the elements of a mask alike, whatever the length is.

A length may say how far values reach: as a size, or where an arange or a slice ends.
Then a mask is the top left part of the mask of a longer sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import LengthNotSymbolic, is_same, is_symbol

from ..analysis.vectors import Evaluator, from_inputs
from ..analysis.views import is_pointwise

aten = torch.ops.aten

_MOST_INDICES = 2**24


def check_alike(module: fx.GraphModule, sources: dict[fx.Node, fx.Node]) -> None:
    """Check a program of masks at one length, by the calls it is made of.

    Args:
        sources: by node of `module`, the one of a symbolic length that it stands for.

    Raises: LengthNotSymbolic, if a length says more than how far values reach.
    """
    evaluator, moving = Evaluator(module), from_inputs(module.graph)
    for copy, node in sources.items():
        if node.op != "call_function":
            continue
        values = (node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes))
        if not any(map(_has_symbol, values)):
            continue
        if copy.target is aten.index.Tensor:
            is_alike = _is_looked_up(node, copy, evaluator, moving)
        else:
            is_alike = _is_alike(node)
        if not is_alike:
            raise LengthNotSymbolic(
                f"{node.target} of an attn_mask may depend on more than its end"
            )


def _has_symbol(value: Any) -> bool:
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    return any(map(is_symbol, sizes))


def _is_alike(node: fx.Node) -> bool:
    """Tell whether elements are computed alike at all lengths that have them."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    names = (argument.name for argument in target._schema.arguments)
    arguments: dict[str, Any] = {
        **dict(zip(names, node.args, strict=False)),
        **node.kwargs,
    }
    for name, argument in arguments.items():
        numbers = (n for n in _nodes(argument) if not isinstance(_value(n), Tensor))
        if name not in ("size", "end") and any(True for _ in numbers):
            return False
    if is_pointwise(target) or target in _ALIKE:
        return True
    check = _CHECKS.get(target)
    return check is not None and check(node, arguments)


def _nodes(argument: Any) -> Iterator[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(argument, nodes.append)
    return iter(nodes)


def _value(node: Any) -> Any:
    return node.meta["val"]


def _keeps_symbols(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Tell whether a view keeps each symbolic size, and so what is between them."""
    before, after = (_between_symbols(_value(x)) for x in (arguments["self"], node))
    return len(before) == len(after) and all(map(is_same, before, after))


def _between_symbols(value: Tensor) -> list[Any]:
    """Return lengths, and the products of the sizes before, between and after them."""
    extents: list[Any] = [1]
    for size in value.shape:
        if is_symbol(size):
            extents += [size, 1]
        else:
            extents[-1] *= int(size)
    return extents


def _is_from_the_start(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Tell whether a slice or an element counts from the start.

    A negative number would count from the end.
    """
    return int(arguments.get("start") or arguments.get("index") or 0) >= 0


def _is_of_fixed_table(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Tell whether a look-up has a fixed table: only its indices may be more."""
    return not _has_symbol(_value(arguments["weight"]))


def _is_after_fixed(node: fx.Node, arguments: dict[str, Any]) -> bool:
    """Tell whether only the last part of a cat may be longer."""
    dim, parts = arguments.get("dim", 0), arguments["tensors"]
    return not any(is_symbol(_value(part).shape[dim]) for part in parts[:-1])


def _is_looked_up(
    node: fx.Node, copy: fx.Node, evaluator: Evaluator, moving: set[fx.Node]
) -> bool:
    """Tell whether an index picks alike at all lengths.

    A negative number in it would count from the end of what it reads.
    """
    _, indices = copy.args
    assert isinstance(indices, list | tuple)
    index_nodes = [i for i in indices if isinstance(i, fx.Node)]
    if any(_value(i).dtype == torch.bool for i in index_nodes):
        return False
    if not _has_symbol(_value(node.args[0])):
        return True
    return not any(
        i in moving
        or _value(i).numel() > _MOST_INDICES
        or bool((evaluator.value(i) < 0).any())
        for i in index_nodes
    )


_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
_REARRANGED = (
    aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.unsqueeze.default, aten.alias.default, aten.detach.default,
    aten.clone.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_ALIKE = {
    *_RANGES, *_REARRANGED, aten.full.default, aten.scalar_tensor.default,
    aten.floor_divide.default, aten.cumsum.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
}  # fmt: skip
_CHECKS: dict[Any, Callable[[fx.Node, dict[str, Any]], bool]] = {
    aten.view.default: _keeps_symbols,
    aten._unsafe_view.default: _keeps_symbols,
    aten.reshape.default: _keeps_symbols,
    aten.slice.Tensor: _is_from_the_start,
    aten.select.int: _is_from_the_start,
    aten.cat.default: _is_after_fixed,
    aten.embedding.default: _is_of_fixed_table,
}
