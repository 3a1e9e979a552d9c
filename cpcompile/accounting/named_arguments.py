"""The arguments of operators by name, with shapes as plain integers."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from cpcompile.geometry.tensor_sizes import size_in_call
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import OpOverload


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return what a call gets: fake values for nodes, expected sizes for symbols."""
    assert isinstance(node.target, OpOverload), f"{node} is no operator"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    return bound(node.target, args, kwargs)


def bound(target: OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by the names of the schema, with defaults."""
    formal = target._schema.arguments
    arguments = dict(zip((x.name for x in formal), args, strict=False)) | dict(kwargs)
    with_defaults = {x.name: arguments.get(x.name, x.default_value) for x in formal}
    return {
        name: pytree.tree_map_only(torch.SymInt, size_in_call, x)
        for name, x in with_defaults.items()
    }
