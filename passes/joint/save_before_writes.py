"""Save for the backward what the forward has read of memory that it writes.

    add = primals_4 + 1; y = x * add; grad_x = grad_y * add; primals_4.copy_(add)
      ->
    add is saved, and the backward does not compute it again

The partitioner may save the memory itself, a buffer with a running mean, and compute
again what was read of it. By then the forward has written there, and the gradient is
wrong (torch 2.13, with any backend).
"""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from cpcompile.torch_private.operators import OpOverload

from ..graph.graph_pass import graph_pass

_COPY = torch.ops.aten.copy_.default


@graph_pass()
def save_before_writes(graph: fx.Graph, ctx: object) -> int:
    """Mark what is computed of written arguments as saved; return how many calls."""
    copies = graph.find_nodes(op="call_function", target=_COPY)
    memory = {x.args[0] for x in copies if x.args[0].op == "placeholder"}
    if not memory:
        return 0
    nodes = list(graph.nodes)
    backward = {x for x in nodes if x.op == "placeholder" and "tangents" in x.name}
    for node in nodes:
        if node.op != "output" and backward.intersection(node.all_input_nodes):
            backward.add(node)
    needed: set[fx.Node] = set()
    for node in reversed(nodes):
        if node not in backward and not (
            backward.isdisjoint(node.users) and needed.isdisjoint(node.users)
        ):
            needed.add(node)
    count = 0
    for node in nodes:
        if node not in needed or not memory.intersection(node.all_input_nodes):
            continue
        if isinstance(node.target, OpOverload) and node.target.is_view:
            memory.add(node)
        else:  # of several results the partitioner saves those that are read
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
            count += 1
    return count
