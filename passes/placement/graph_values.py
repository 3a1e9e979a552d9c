"""Facts about the nodes of a graph, to be read; GraphWriter changes the graph."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ..flow.flow import flows_of
from ..flow.trial import Trial
from ..graph.calls import function_of
from ..graph.constant_arguments import MeshAxis
from ..graph.context import Context
from ..graph.new_call import NewCall
from ..graph.sequence_tokens import TokenDim
from .joint_calls import JointMesh, joint_mesh_on, joint_mesh_with
from .placement_calls import cp_shard


class GraphValues:
    """The values of a graph's nodes, on fake tensors, and what goes with them."""

    values: Mapping[fx.Node, Any]
    # The memory of a value; a value that a pass inserts has the memory of another.
    storages: Mapping[fx.Node, int | None]
    # The dimension along which a value is split, if it leads to attention, or if it is
    # an input and the user says so.
    sequence_dims: Mapping[fx.Node, TokenDim]
    # Values that are computed from parameters alone.
    of_parameters: Set[fx.Node]
    # Plain ids that entered as DTensors, and these DTensors.
    sharded_ids: Mapping[fx.Node, fx.Node]

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode) -> None:
        self.ctx = ctx
        self.cp_axis = MeshAxis(ctx.mesh, ctx.axis)
        self.trial = Trial(fake_mode, ctx.has_symbols, ctx.backward)
        self.flows = flows_of(fake_mode, ctx.mesh.device_type)

    def value(self, argument: Any) -> Any:
        """Return the fake value of an argument, which may be nested."""
        return fx.node.map_aggregate(
            argument,
            lambda a: self.values[a] if isinstance(a, fx.Node) else a,
        )

    def cut(self, x: Any, dim: TokenDim) -> NewCall:
        """Return the call that splits a plain or Replicate value along `dim`."""
        if dim.outer == 1:
            return NewCall(cp_shard, (x, self.cp_axis, dim.dim))
        # What DTensor gets by a view lies as what a view makes of other tokens. A
        # placement that is asked for counts as another one: it gathers where they meet.
        rows = NewCall(torch.unflatten, (x, dim.dim, (dim.outer, -1)))
        tokens = NewCall(cp_shard, (rows, self.cp_axis, dim.dim + 1))
        return NewCall(torch.flatten, (tokens, dim.dim, dim.dim + 1))

    def joint_with(self, other: DeviceMesh) -> JointMesh:
        """Return the joint mesh for the user's DTensors on other axes."""
        return joint_mesh_with(self.ctx, other)

    def joint_of(self, node: fx.Node) -> JointMesh | None:
        """Return the mesh of a DTensor on other axes that a node reads, or None."""
        for x in node.all_input_nodes:
            for value in pytree.tree_leaves(self.values.get(x)):
                if self.is_joint(value):
                    return joint_mesh_on(self.ctx, value.device_mesh)
        return None

    def is_joint(self, value: Any) -> bool:
        """Tell whether a value lies on other axes too."""
        return isinstance(value, DTensor) and value.device_mesh != self.ctx.mesh

    def callable(self, node: fx.Node) -> Any:
        """Return what a node calls as a function; methods become functions."""
        return function_of(node)
