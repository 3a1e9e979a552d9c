"""Find the mesh that a Dynamo graph runs on, and what its inputs stand for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame
from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.options import Options
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.placement.gathered_parameters import sharded_parameters
from cpcompile.ranks.shardings import axis_index, flat_axis
from cpcompile.ranks.stand_ins import stands_for


def find_mesh(
    graph: fx.Graph, options: Options, frame: Frame
) -> tuple[DeviceMesh, int] | None:
    """Return the mesh to work on and the number of its sequence axis.

    DTensor inputs on the axis bring their mesh. Without them it is the 1-D mesh of the
    axis of `options["mesh"]`. DTensors on other axes belong to tensor parallelism. The
    result is None for a part of the user's function (Frame.is_part) that has neither
    DTensors nor `options["mesh"]`.

    Raises: InputError if there is no mesh, more than one, or no such axis.
    """
    for node in graph.find_nodes(op="placeholder"):
        if real_input(node) is not example(node):
            return real_input(node).device_mesh, 0
    axis = options.axis
    name = axis if isinstance(axis, str) else "_".join(axis)  # see cp.shard
    parameters = sharded_parameters(graph)  # may lie on any axes
    meshes = {
        value.device_mesh
        for node in graph.find_nodes(op="placeholder")
        if isinstance(value := fake_value(node), DTensor) and node not in parameters
    }
    with_axis = {x for x in meshes if name in (x.mesh_dim_names or (name,))}
    if len(with_axis) > 1:
        raise InputError(
            f"the inputs are DTensors on {len(with_axis)} meshes: {with_axis}"
        )
    if with_axis:
        mesh = with_axis.pop()
        place = axis_index(mesh, name)
        _check_one_axis(mesh, place, options)
        return mesh, place
    if options.mesh is not None:
        return flat_axis(options.mesh, axis), 0
    if frame.is_part and not meshes:
        return None
    if meshes:
        axes = sorted({name for x in meshes for name in x.mesh_dim_names or ()})
        raise InputError(
            f"the inputs of {frame.name} are DTensors on the axes {axes}, none of "
            f"which is {name!r}; needed a mesh with that axis: "
            "options={'mesh': mesh}, or the name of the axis that shards the sequence"
        )
    raise InputError(
        f'backend="cp" compiles {frame.name}, and nothing says what to shard; needed '
        "DTensor inputs (cp.shard(x, mesh, dim)) or "
        'options={"mesh": mesh, "shard": {"argument name": dim}}'
    )


def _check_one_axis(mesh: DeviceMesh, axis: int, options: Options) -> None:
    """Raise InputError if the options shard the sequence over other ranks."""
    if options.mesh is None:
        return
    wanted = flat_axis(options.mesh, options.axis).get_group()
    ranks = [dist.get_process_group_ranks(x) for x in (mesh.get_group(axis), wanted)]
    if ranks[0] != ranks[1]:
        raise InputError(
            f"the inputs are DTensors over the ranks {ranks[0]}, and options['mesh'] "
            f"has the ranks {ranks[1]} on {options.axis!r}; needed one of both: leave "
            "options['mesh'] away"
        )


def example(node: fx.Node) -> Any:
    """Return what the first call gave for an input; None if Dynamo does not say it."""
    return getattr(node.meta.get("grapharg"), "example", None)


def real_input(node: fx.Node) -> Any:
    """Return what the first call gave for an input, or what that stands for."""
    return stands_for(example(node))


def read_stand_ins(graph: fx.Graph) -> None:
    """Give inputs that are stand-ins the values that they stand for (stand_ins.py)."""
    for node in graph.find_nodes(op="placeholder"):
        tokens = stands_for(example(node))
        if tokens is example(node):
            continue
        fake = fake_value(node)
        with fake.fake_mode:
            shape = tokens._local_tensor.shape
            local = torch.empty(shape, dtype=fake.dtype, device=fake.device)
        local.requires_grad_(fake.requires_grad)
        placed = tokens.device_mesh, tokens.placements
        node.meta["example_value"] = dtensor_of(
            local, *placed, tokens.shape, tokens.stride()
        )
