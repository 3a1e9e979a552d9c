"""Find where a graph runs torch.func transforms: vmap, grad, vjp, jvp and their users.

Dynamo writes these as calls that change a state, and calls that wrap tensors for it:

    _vmap_increment_nesting, _add_batch_dim(x), mul, _remove_batch_dim,
    _vmap_decrement_nesting

A region runs from the first change of the state to the last. Calls of vjp wrap tensors
that are used later; then the region goes on to their last use, with all that depends
on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensor
from cpcompile.torch_private.operators import predispatch

from .nodes import all_graphs, fake_value

# Private, in torch 2.13 and 2.15.
_BEGINS = (
    predispatch._vmap_increment_nesting,
    predispatch._jvp_increment_nesting,
    torch._C._functorch._grad_increment_nesting,
)
_ENDS = (
    predispatch._vmap_decrement_nesting,
    predispatch._jvp_decrement_nesting,
    torch._C._functorch._grad_decrement_nesting,
)


def transforms(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Yield the nodes of every outermost region; the graph may change meanwhile.

    The regions and their nodes are in order.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    visited: set[fx.Node] = set()
    for start, first in enumerate(nodes):
        if first in visited or not _is(first, _BEGINS):
            continue
        nested = last = _end_of_nesting(nodes, start)
        inside: dict[fx.Node, None] = {}
        at = start
        while at <= last:
            node = nodes[at]
            depends = not inside.keys().isdisjoint(node.all_input_nodes)
            if node.op.startswith("call_") and (at <= nested or depends):
                inside[node] = None
                if _is_wrapped(fake_value(node)):
                    last = max([last, *(position[user] for user in node.users)])
            at += 1
        visited |= inside.keys()
        yield list(inside)


def inside_transforms(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of all regions, also in checkpoint regions."""
    return {
        node
        for subgraph in all_graphs(graph)
        for region in transforms(subgraph)
        for node in region
    }


def _end_of_nesting(nodes: list[fx.Node], start: int) -> int:
    depth = 0
    for end in range(start, len(nodes)):
        depth += _is(nodes[end], _BEGINS) - _is(nodes[end], _ENDS)
        if not depth:
            return end
    raise AssertionError("a transform that begins ends")


def _is(node: fx.Node, targets: tuple[Any, ...]) -> bool:
    return node.op == "call_function" and any(node.target is x for x in targets)


def _is_wrapped(value: Any) -> bool:
    return any(
        isinstance(x, Tensor) and not isinstance(x, FakeTensor | DTensor)
        for x in pytree.tree_leaves(value)
    )
