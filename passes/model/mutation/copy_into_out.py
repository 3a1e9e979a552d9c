"""Make a result that is written to `out=` a new one, which is copied there.

    u = normalize(mv, out=buffer)
      ->
    normalize = normalize(mv)
    u = buffer.copy_(normalize)

Autograd records no call that has `out=`, so that no gradient is lost or made. Left
alone: several results, results of another size than the memory, which torch would
resize, and operators of others, whose `out` may be any argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.torch_private.operators import OpOverload, OpOverloadPacket

from ...graph.calls import spelled
from ...graph.constant_arguments import Method
from ...graph.nodes import fake_value, insert_call

Value = Callable[[fx.Graph, Callable[..., Any], Any, dict[str, Any]], Any]


def copy_into_out(graph: fx.Graph, value_of_call: Value) -> int:
    """Rewrite the calls of a graph that write to `out=`; return their number."""
    rewritten = 0
    for node in list(graph.nodes):
        out = node.kwargs.get("out")
        target: Any = node.target
        overload = isinstance(target, OpOverload | OpOverloadPacket)
        if not isinstance(out, fx.Node) or overload or not spelled(node):
            continue
        kwargs = {name: x for name, x in node.kwargs.items() if name != "out"}
        given = fx.node.map_aggregate((node.args, kwargs), fake_value)
        with torch.no_grad():
            value = value_of_call(graph, target, *given)
        memory = fake_value(out)
        if not isinstance(value, Tensor) or value.shape != memory.shape:
            continue
        with graph.inserting_before(node):
            new = insert_call(
                graph,
                target,
                node.args,
                kwargs=kwargs,
                like=node,
                value=value.detach(),
            )
            copy = insert_call(
                graph, Method("copy_"), (out, new), like=node, value=memory
            )
        node.replace_all_uses_with(copy)
        graph.erase_node(node)
        rewritten += 1
    return rewritten
