"""What a model itself does with DTensors on the mesh of the sequence.

    x.redistribute(placements=[Replicate()])     ->  x
    x.full_tensor()                              ->  x, which leaves whole

The joint graph has whole values, and where they lie is decided later. So a new
placement is no call at all, and neither is the local part of what every rank has in
whole. A part of the tokens has no place in it.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.errors import RewriteError

from ..graph.context import Context
from ..graph.mesh_changes import MeshChange, mesh_change
from ..graph.nodes import all_graphs, fake_value, where


def drop_mesh_changes(graph: fx.Graph, ctx: Context) -> None:
    """Take these calls out of a graph and its checkpoint regions.

    Raises: RewriteError for the part of a rank, or a tensor that is made of such parts.
    """
    for subgraph in all_graphs(graph):
        for node in list(subgraph.nodes):
            change = mesh_change(node)
            if change is not None and _is_ours(node, change, ctx):
                _check(node, change)
                node.replace_all_uses_with(node.args[0])
                subgraph.erase_node(node)


def _is_ours(node: fx.Node, change: MeshChange, ctx: Context) -> bool:
    inside = node if change is MeshChange.FROM_LOCAL else node.args[0]
    value = fake_value(inside)
    return isinstance(value, DTensor) and value.device_mesh == ctx.mesh


def _check(node: fx.Node, change: MeshChange) -> None:
    if change is MeshChange.REDISTRIBUTE:
        return
    inside: Any = node if change is MeshChange.FROM_LOCAL else node.args[0]
    placements: tuple[Any, ...] = fake_value(inside).placements
    if change is MeshChange.FULL_TENSOR:
        placements = ()
    gradients: Any = node.kwargs.get("grad_placements") or ()
    if not all(p.is_replicate() for p in (*placements, *gradients)):
        raise RewriteError(
            f"{change.value} at {where(node)}: got a tensor with placements "
            f"{fake_value(inside).placements} on the mesh of the sequence, of which "
            "each rank has another part; needed DTensors: return one, and take its "
            "part outside of what is compiled, or call full_tensor()"
        )
