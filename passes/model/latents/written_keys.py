"""Say keys that are written into a new tensor, part by part, as parts side by side.

    k = nope.new_empty(B, H, S, 192)
    k[..., :128] = nope; k[..., 128:] = rope            -> k = cat([nope, rope], -1)

A write hides where values come from, and cannot be made again elsewhere. Left alone:
parts in another order, parts that overlap or leave entries, what is broadcast, a tensor
that is read in between.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...graph.calls import NEW_TENSORS, spelled
from ...graph.nodes import fake_mode_of, fake_value


def join_written(node: fx.Node) -> bool:
    """Let a new tensor be the cat of what is written into it; tell whether it was."""
    value, graph = fake_value(node), node.graph
    if spelled(node) not in NEW_TENSORS or not isinstance(value, Tensor):
        return False
    if any(x.target is torch._C._set_grad_enabled for x in graph.nodes):
        return False  # what is written under no_grad has no gradient
    writes = [x for x in node.users if spelled(x) == "setitem" and x.args[0] is node]
    parts = [x.args[2] for x in writes]
    if not writes or not all(isinstance(x, fx.Node) for x in parts):
        return False
    values = [fake_value(x) for x in parts]
    first = 0
    for write, part in zip(writes, values, strict=True):
        size = _size_at(write.args[1], first, value)
        if size is None or type(part) is not type(value) or write.users:
            return False
        if part.shape != (*value.shape[:-1], size) or part.dtype != value.dtype:
            return False
        first += size
    order = {x: place for place, x in enumerate(graph.nodes)}
    others = node.users.keys() - set(writes)
    last = max(writes, key=order.__getitem__)
    if first != value.shape[-1] or any(order[x] < order[last] for x in others):
        return False
    last.append(node)
    node.op, node.target, node.args, node.kwargs = (
        "call_function", torch.cat, (parts, -1), {},
    )  # fmt: skip
    with fake_mode_of(graph), torch.enable_grad():
        node.meta["example_value"] = torch.cat(values, -1)
    for write in writes:
        graph.erase_node(write)
    return True


def _size_at(index: Any, first: int, value: Tensor) -> int | None:
    """Return how much of the last dimension an index names from `first` on.

    None if it names something else.
    """
    *whole, own = index if isinstance(index, tuple) else (index,)
    if any(x != slice(None) and x is not Ellipsis for x in whole):
        return None
    if len(whole) != value.ndim - 1 and Ellipsis not in whole:
        return None
    if not isinstance(own, slice) or own.step not in (None, 1):
        return None
    limits = (own.start, own.stop, value.shape[-1])
    if not all(x is None or isinstance(x, int) for x in limits):
        return None
    start, stop, _ = own.indices(int(value.shape[-1]))
    return stop - start if start == first and stop > start else None
