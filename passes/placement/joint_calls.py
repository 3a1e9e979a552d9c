"""Functions by which values get to a mesh of several axes, and back.

Note [Tensor parallelism]
`parallelize_module(model, mesh["tp"], plan)` puts DTensors on the axis "tp" into the
graph that Dynamo traces: `from_local`, calls on DTensors, `redistribute`, `to_local`.
Everything between a `to_local` and the next `from_local` is plain there, and differs
from rank to rank of tp: each has its own heads.

Values that are plain to Dynamo lie on the mesh of the sequence axis alone, as without
tensor parallelism. Values that are DTensors to Dynamo lie on the joint mesh of the
sequence axis and tp: the placement on the first axis is ours, those on the others are
the user's. The local tensor is the same for both, so that going from one to the other
communicates nothing.

Note [Tokens that tp shards]
With sequence parallelism `to_local` gives each rank of tp a chunk of the tokens, and
the sequence axis takes a chunk of that chunk: rank (c, t) would have tokens of the t-th
chunk. DTensor's [Shard(1), Shard(1)] has cut the sequence the other way round, so that
they would have to be exchanged at every `to_local` and `from_local`. But as long as
calls do the same with every token, it does not matter which tokens a rank has: such
values stay on the joint mesh, although they are plain to Dynamo, and are called
token chunks here. Calls on them are proved by DTensor's propagation; before any other
call they are brought to the form that Dynamo means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.errors import InputError
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ranks.joint_mesh import joint_mesh
from cpcompile.torch_private import pytree

from ..graph.constant_arguments import Callee, MeshAxis
from ..graph.context import Context
from .edge_gradients import UnreducedGradient

Placements = tuple[Placement, ...]
_WHOLE = Replicate()


@dataclass(frozen=True)
class JointMesh:
    """The mesh of the sequence axis and of other axes.

    joint: its first axis, the one of the sequence. other: the mesh without that axis.
    """

    joint: MeshAxis
    other: DeviceMesh


def joint_mesh_with(ctx: Context, other: DeviceMesh) -> JointMesh:
    """Return the joint mesh of a graph's sequence axis and another mesh, made once.

    Raises: InputError if the sequence lies on a mesh of several axes.
    """
    meshes = _joint_meshes(ctx)
    if other not in meshes:
        if ctx.mesh.ndim != 1:
            raise InputError(
                f"the sequence lies on a mesh with the axes {ctx.mesh.mesh_dim_names}, "
                f"and there are DTensors on {other.mesh_dim_names}; needed tokens that "
                'lie on the axis of the sequence alone: cp.shard(x, mesh["cp"], dim)'
            )
        meshes[other] = JointMesh(MeshAxis(joint_mesh(ctx.mesh, other)), other)
    return meshes[other]


def joint_mesh_on(ctx: Context, mesh: DeviceMesh) -> JointMesh:
    """Return the joint mesh of a graph that is `mesh`."""
    return next(x for x in _joint_meshes(ctx).values() if x.joint.mesh == mesh)


def _joint_meshes(ctx: Context) -> dict[DeviceMesh, JointMesh]:
    meshes: dict[DeviceMesh, JointMesh] = ctx.findings.shared.setdefault(
        "joint_meshes", {}
    )
    return meshes


def cp_tp_enter(
    x: Tensor,
    joint: MeshAxis,
    placements: Placements,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    factor: int = 0,
) -> DTensor:
    """Bring the local part of a DTensor on the other axes to the joint mesh.

    factor: 0 completes the gradient on the sequence axis; else it is `factor` times
    this rank's summand there.
    """
    return UnreducedGradient.apply(  # type: ignore[no-any-return, no-untyped-call]
        x,
        joint.mesh,
        (_WHOLE, *placements),
        (0,) if factor else (),
        factor or 1,
        (torch.Size(shape), stride),
    )


def cp_tp_place(
    x: Tensor,
    joint: MeshAxis,
    placements: Placements,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> DTensor:
    """Turn the local part of a DTensor on the joint mesh into that DTensor."""
    return dtensor_of(x, joint.mesh, placements, shape, stride)


def cp_tp_lift(
    x: Tensor, joint: MeshAxis, cp_axis: MeshAxis, placements: Placements
) -> DTensor:
    """Bring a value to the joint mesh; `placements` are those on the other axes.

    The value is on the sequence axis, `on`, or plain.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, cp_axis.mesh, (_WHOLE,), run_check=False)
    if x.placements[0].is_partial():
        x = x.redistribute(placements=(_WHOLE,))
    shape = list(x.shape)
    for size, placement in zip(joint.mesh.shape[1:], placements, strict=True):
        if isinstance(placement, Shard):
            shape[placement.dim] *= size
    return _placed(local_part(x), joint.mesh, (x.placements[0], *placements), shape)


def cp_tp_share(x: Tensor, joint: MeshAxis) -> DTensor:
    """Make a plain tensor Replicate on the joint mesh.

    Its gradient is complete on the sequence axis only.
    """
    everywhere = (_WHOLE,) * joint.mesh.ndim
    other_axes = tuple(range(1, joint.mesh.ndim))
    return UnreducedGradient.apply(x, joint.mesh, everywhere, other_axes, 1, None)  # type: ignore[no-any-return, no-untyped-call]


def cp_tp_move(x: DTensor, placements: Placements) -> DTensor:
    """Bring x to other placements on the other axes."""
    first = x.placements[0]
    return x.redistribute(placements=(first, *placements))


def cp_tp_lower(
    x: DTensor, cp_axis: MeshAxis, grad_placements: Sequence[Placement] | None = None
) -> DTensor:
    """Bring x to the sequence axis, `on`, as it is on this rank of the other axes.

    grad_placements: the placements of the gradient on the other axes.
    """
    first, *other_placements = x.placements
    if first.is_partial():
        x, first = x.redistribute(placements=(_WHOLE, *other_placements)), _WHOLE
    if grad_placements is None:
        grad_placements = [_WHOLE if p.is_partial() else p for p in other_placements]
    local = local_part(x, (first, *grad_placements))
    shape = list(local.shape)
    if isinstance(first, Shard):
        shape[first.dim] = x.shape[first.dim]
    return _placed(local, cp_axis.mesh, (first,), shape)


def cp_tp_regular(x: DTensor, cp_axis: MeshAxis) -> DTensor:
    """Turn token chunks into what Dynamo means; Note [Tokens that tp shards]."""
    return cp_tp_lower(x.redistribute(placements=(_WHOLE, *x.placements[1:])), cp_axis)


def cp_tp_leave(x: DTensor) -> Tensor:
    """Return the local part of a DTensor on other axes that leaves the graph."""
    other_placements = [_WHOLE if p.is_partial() else p for p in x.placements[1:]]
    return local_part(x.redistribute(placements=(_WHOLE, *other_placements)))


def cp_tp_leave_chunks(x: DTensor) -> Tensor:
    """Return the local part of token chunks that leave the graph as they are."""
    return local_part(x)


def cp_tp_replicated(target: Callee, /, *args: Any, **kwargs: Any) -> Any:
    """Call `target` on whole sequences, as the user's DTensors compute it."""

    def gathered(x: DTensor) -> DTensor:
        return x.redistribute(placements=(_WHOLE, *x.placements[1:]))

    args, kwargs = pytree.tree_map_only(DTensor, gathered, (args, kwargs))
    return target(*args, **kwargs)


def _placed(
    local: Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> DTensor:
    """Return the DTensor of this shape whose local part on this rank is `local`.

    Its dimensions lie in memory in the order of those of `local`.
    """
    strides, step = [0] * local.ndim, 1
    for dim in sorted(range(local.ndim), key=lambda d: (local.stride(d), -d)):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return dtensor_of(local, mesh, placements, shape, strides)
