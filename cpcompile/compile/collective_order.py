"""Keep the cp:: operators in one order with the collectives of a compiled graph.

Inductor orders nodes by their data and by the memory they need, and keeps only what it
knows as collectives in the order of the graph. Where shards are uneven, sizes and so
the order differ from rank to rank; an attention operator that moves past an all-reduce
on one rank only is a deadlock. So operators that communicate are made known as
collectives, and so are calls of functions that contain one. (Steps do not communicate,
and shifts are lowered as collectives.)
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch.fx as fx

# The order of the scheduler, asked nowhere else; seen in 2.13, probed in
# inductor_compat.py.
from torch._inductor import comms, ir
from torch._inductor.scheduler import BaseSchedulerNode

from cpcompile.ops.comm.communicating import communicates


@functools.cache
def install() -> None:
    """Let Inductor's ordering of collectives include the cp:: operators."""
    original = comms.contains_collective
    answers: WeakKeyDictionary[BaseSchedulerNode, bool] = WeakKeyDictionary()

    @functools.wraps(original)
    def contains_collective(
        snode: BaseSchedulerNode, *args: Any, **kwargs: Any
    ) -> bool:
        # Asked for again and again, of each node in reach of each collective.
        if args or kwargs:  # which collective
            return _communicates(snode) or original(snode, *args, **kwargs)
        if snode not in answers:
            answers[snode] = _communicates(snode) or original(snode)
        return answers[snode]

    comms.contains_collective = contains_collective


def _communicates(snode: BaseSchedulerNode) -> bool:
    if isinstance(snode.node, ir.InvokeSubgraph):  # repeated blocks, or a tile
        subgraph = snode.node.subgraph
        assert subgraph is not None, "a call has a function"
        return any(map(_exchanges, subgraph.graph_module.graph.nodes))
    op = getattr(snode.node, "op_overload", None)
    return isinstance(snode.node, ir.FallbackKernel) and communicates(op)


def _exchanges(node: fx.Node) -> bool:
    """Tell whether a call in a function exchanges messages, by us or by torch."""
    is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_collective or communicates(node.target)
