"""The inputs of a Dynamo graph: on which mesh, and how each is to be sharded."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile import tracing
from cpcompile.arguments import Frame
from cpcompile.errors import InputRejected
from cpcompile.logs import warn_once
from cpcompile.options import Options
from cpcompile.passes.context import GraphInput, InputKind
from cpcompile.passes.graph import concrete_layout, fake_value
from cpcompile.shardings import axis_index, check_dim, flat_axis


def find_mesh(
    graph: fx.Graph, options: Options, frame: Frame
) -> tuple[DeviceMesh, int] | None:
    """The mesh to work on and its sequence axis; None after a break without DTensors.

    DTensor inputs bring their mesh; else it is the axis of `options["mesh"]`, alone.

    Raises: InputRejected if there is no mesh, more than one, or no such axis.
    """
    meshes = {
        value.device_mesh
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := fake_value(node), DTensor)
    }
    if len(meshes) > 1:
        raise InputRejected(
            f"the inputs are DTensors on {len(meshes)} meshes: {meshes}"
        )
    if meshes:
        mesh, axis = meshes.pop(), options.axis
        name = axis if isinstance(axis, str) else "_".join(axis)  # see cp.shard
        return mesh, axis_index(mesh, name)
    if options.mesh is not None:
        return flat_axis(options.mesh, options.axis), 0
    if frame.is_part:
        return None
    raise InputRejected(
        f'backend="cp" compiles {frame.name}, and nothing says what to shard; needed '
        "DTensor inputs (cp.shard(x, mesh, dim)) or "
        'options={"mesh": mesh, "shard": {"argument name": dim}}'
    )


def classify_inputs(
    graph: fx.Graph, named: dict[fx.Node, tuple[str, int]], options: Options
) -> dict[fx.Node, GraphInput]:
    """What every graph input is; raises InputRejected for a wrong dim in `shard`.

    `named` are the inputs to shard, by the names of their nodes.
    """
    reduced = options.grad_sync == "reduce"
    by_name = {node.name: given for node, given in named.items()}
    inputs: dict[fx.Node, GraphInput] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if isinstance(value, DTensor):
            if node.name in by_name:
                warn_once(
                    f"options['shard'] names {by_name[node.name][0]!r}, which is a "
                    f"DTensor already; its own placements {value.placements} count"
                )
            whole = all(p.is_replicate() for p in value.placements)
            inputs[node] = GraphInput(
                InputKind.DTENSOR,
                placements=value.placements,
                reduced=reduced or not (whole and _is_parameter(node)),
            )
        elif node.name in by_name:
            name, dim = by_name[node.name]
            dim = check_dim(f"options['shard'][{name!r}]", value, dim)
            inputs[node] = GraphInput(InputKind.FULL, dim)
        elif isinstance(value, Tensor) and value.requires_grad:
            if _is_parameter(node):
                inputs[node] = GraphInput(InputKind.PARAMETER, reduced=reduced)
            else:
                inputs[node] = GraphInput(InputKind.ACTIVATION)
        else:
            inputs[node] = GraphInput(InputKind.PLAIN)
    return inputs


def specialize_sizes(graph: fx.Graph) -> None:
    """Each sequence length is compiled on its own: symbolic sizes get their value.

    Asking a symbol for its value adds the guard that makes Dynamo recompile for others.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if isinstance(value, torch.SymInt):
            int(value)
        elif isinstance(value, Tensor):
            concrete_layout(value)
            if isinstance(value, DTensor):
                concrete_layout(value.to_local())
                argument = node.meta.get("grapharg")
                if argument is not None and not _is_parameter(node):
                    tracing.guard_global_shape(argument.source)


def _is_parameter(node: fx.Node) -> bool:
    """Whether a graph input is a leaf whose gradient an optimiser will read."""
    real = getattr(node.meta.get("grapharg"), "example", None)
    return isinstance(real, torch.nn.Parameter)
