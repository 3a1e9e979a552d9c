"""The arguments of operators by name, with shapes as plain integers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import expected


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What a call gets: fake values for nodes, and expected sizes for symbols."""
    assert isinstance(node.target, OpOverload), f"{node} is no operator"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return bound(node.target, args, kwargs)


def bound(target: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments by the names of the schema, with defaults."""
    formal = target._schema.arguments
    given = dict(zip((x.name for x in formal), args, strict=False)) | dict(kwargs)
    found = {x.name: given.get(x.name, x.default_value) for x in formal}
    return {
        name: size_in_call(x) if isinstance(x, torch.SymInt) else x
        for name, x in found.items()
    }


def size_in_call(n: int | torch.SymInt) -> int:
    """The size that is expected; 0 for one that only the data tells."""
    if isinstance(n, torch.SymInt) and not n.node.has_hint():
        return 0
    return expected(n)


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The sizes in this call."""
    return tuple(map(size_in_call, x.shape))


def elements_of(x: Tensor) -> int:
    """How many numbers a tensor has in this call."""
    return math.prod(shape_of(x))


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of several."""
    return sum(
        elements_of(x) * x.dtype.itemsize
        for x in pytree.tree_leaves(value)
        if isinstance(x, Tensor)
    )
