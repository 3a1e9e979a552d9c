"""Assignments to a part of a tensor whose tokens all of them concern alike.

    part = getitem(k, (..., slice(None, 16)))
    copy_ = .copy_(part, x)
      ->
    copy_ = cp_assign(k, x, 3, 0, 16, 1)

A part of the channels, say, is assigned on every rank to its own tokens; nothing has to
be gathered. `sharding_rules` gathers for other assignments.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch.fx as fx
from torch import Tensor

if TYPE_CHECKING:
    from cpcompile.passes.shard_graph import Sharder

Part = tuple[int, int, int, int]  # dimension, start, end, step


def write_as_assignment(node: fx.Node) -> None:
    """`x[index].copy_(y)` becomes `x[index] = y`, where nothing else reads either."""
    part = node.args[0] if node.args else None
    if (
        node.op != "call_method"
        or node.target != "copy_"
        or len(node.args) != 2
        or node.users
        or not isinstance(part, fx.Node)
        or part.target is not operator.getitem
        or set(part.users) != {node}
    ):
        return
    whole, index = part.args
    node.op, node.target = "call_function", operator.setitem
    node.args, node.kwargs = (whole, index, node.args[1]), {}
    node.graph.erase_node(part)


def assign_part(sharder: Sharder, node: fx.Node) -> bool:
    """Give an assignment its value, if it touches no dimension that is split."""
    if node.target is not operator.setitem or not isinstance(node.args[2], fx.Node):
        return False
    base, index, _ = node.args
    whole, value = sharder.value(base), sharder.value(node.args[2])
    part = _part(index, whole)
    split = {getattr(p, "dim", None) for p in whole.placements}
    if part is None or part[0] in split or not isinstance(value, Tensor):
        return False
    originals = node.args
    sharder.wrap_inputs(node)
    args = (node.args[0], node.args[2], *part)
    result, problem = sharder.trial.run(sharder.calls.assign, sharder.value(args), {})
    if problem is not None or result.placements != whole.placements:
        node.args = originals
        return False
    node.target, node.args = sharder.calls.assign, args
    sharder.values[node] = node.meta["example_value"] = result
    return True


def _part(index: Any, whole: Tensor) -> Part | None:
    """The one dimension of which an index takes a part, or None for other indices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    missing = whole.ndim - sum(entry is not Ellipsis for entry in entries)
    if entries.count(Ellipsis) > 1 or missing < 0:
        return None
    if Ellipsis in entries:
        place = entries.index(Ellipsis)
        entries[place : place + 1] = [slice(None)] * missing
    parts: list[Part] = []
    for dim, entry in enumerate(entries):
        if not isinstance(entry, slice):
            return None
        if entry == slice(None):
            continue
        size, bounds = whole.shape[dim], (entry.start, entry.stop, entry.step)
        if not all(isinstance(n, int | None) for n in (size, *bounds)):
            return None
        start, end, step = entry.indices(size)
        parts.append((dim, start, max(start, end), step))
    return parts[0] if len(parts) == 1 else None
