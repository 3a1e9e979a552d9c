"""Read what an index says of every dimension.

x[..., arange(2, 9), :], x [B, S, C]  ->  slice(None), slice(2, 9, 1), slice(None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...graph.calls import canonical_call
from ...graph.nodes import fake_value


def index_items(index: Any, shape: Sequence[Any]) -> tuple[Any, ...] | None:
    """Write an index out, with an item for every dimension; None for masks, lists.

    A range of numbers that is the only tensor becomes a slice: x[:, arange(4, 9)].
    """
    items = list(index) if isinstance(index, tuple) else [index]
    for item in items:
        value = fake_value(item) if isinstance(item, fx.Node) else item
        if isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8):
            return None
        if isinstance(value, bool | list):
            return None
    counted = sum(item is not None and item is not Ellipsis for item in items)
    if sum(item is Ellipsis for item in items) > 1 or counted > len(shape):
        return None
    if Ellipsis not in [x for x in items if not isinstance(x, fx.Node)]:
        items.append(Ellipsis)
    at = next(i for i, item in enumerate(items) if item is Ellipsis)
    whole = [slice(None)] * (len(shape) - counted)
    return _with_slice((*items[:at], *whole, *items[at + 1 :]), shape)


def _with_slice(items: tuple[Any, ...], shape: Sequence[Any]) -> tuple[Any, ...]:
    """Write a range of numbers that is the only index as a slice."""
    indices = [i for i, item in enumerate(items) if not isinstance(item, slice)]
    if len(indices) != 1 or not isinstance(items[indices[0]], fx.Node):
        return items
    (at,) = indices
    call = canonical_call(items[at])
    if call.name != "arange":
        return items
    start, end = call.arguments.get("start", 0), call.arguments["end"]
    step = call.arguments.get("step", 1)
    first, last, each = map(fake_value, (start, end, step))
    numbers = isinstance(first, int) and isinstance(each, int) and each > 0 <= first
    if not numbers or not isinstance(last, int | torch.SymInt):
        return items
    if not statically_known_true(last <= shape[at]):
        return items  # torch raises, where a slice ends
    return (*items[:at], slice(start, end, step), *items[at + 1 :])


def place_of(items: tuple[Any, ...], dim: int) -> int:
    """Return the place of the item of a dimension; None adds one."""
    places = [i for i, item in enumerate(items) if item is not None]
    return places[dim]
