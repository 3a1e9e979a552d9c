"""Read calls of a graph after autograd: their lines, and their arguments by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from cpcompile.accounting.graph_account import Line
from cpcompile.geometry.tensor_sizes import size_in_call
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import OpOverload

_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<number>\d+), in (?P<name>\S+)')


def line_of(node: fx.Node) -> Line:
    """Return the innermost line that torch has noted; a backward has its forward's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return Line()
    file, number, name = frames[-1]
    return Line(file, int(number), name)


def calls_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield every call of a graph and of functions that it calls, such as tiles."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        yield node
        for argument in node.args:
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                inner = getattr(module, str(argument.target), None)
                if isinstance(inner, fx.GraphModule):
                    yield from calls_of(inner)


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
