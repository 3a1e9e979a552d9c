"""Find the line of the user's program that a node after autograd belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch.fx as fx

from cpcompile.accounting.graph_account import Line

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
