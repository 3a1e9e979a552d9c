"""Refuse parameters on a mesh that is no other axes of that of the sequence."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.errors import InputError


def check_other_axes(sequence: DeviceMesh, other: DeviceMesh) -> None:
    """Check that every rank of `other` has another group of the sequence axis.

    Raises: InputError unless both are axes of one mesh, and different ones.
    """
    root = _common_root(sequence, other)
    names = other.mesh_dim_names
    if root is None or names is None:
        raise InputError(
            f"the sequence is sharded over {_text(sequence)}, and parameters are "
            f"DTensors on {_text(other)}; needed two axes of one mesh: "
            'mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("cp", "tp")), '
            'with parallelize_module(model, mesh["tp"], ...) and options={"mesh": mesh}'
        )
    axes = _axes(root, names)
    sequence_ranks = dist.get_process_group_ranks(sequence.get_group())
    table = torch.stack([_row(root.mesh, rank, axes) for rank in sequence_ranks])
    if len(table.unique()) < table.numel():
        raise InputError(
            f"parameters are DTensors on {_text(other)}, which includes the axis of "
            f"the sequence, {_text(sequence)}; needed parameters on other axes, as "
            'parallelize_module(model, mesh["tp"], ...) makes them'
        )


def _common_root(sequence: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh that both are axes of, or None.

    The mesh of a DTensor may be an equal one that was cut from another root, which
    DTensor's caches keep: so either root will do.
    """
    for root in (other._get_root_mesh(), sequence._get_root_mesh()):
        cut = sequence._get_root_mesh() == root or _has_axes(root, sequence)
        if cut and _has_axes(root, other):
            return root
    return None


def _has_axes(root: DeviceMesh, mesh: DeviceMesh) -> bool:
    """Tell whether the axes of `mesh` are those of `root` with the same names."""
    names = mesh.mesh_dim_names
    if root.get_coordinate() is None or mesh.device_type != root.device_type:
        return False
    if names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return False
    return torch.equal(_row(root.mesh, root.get_rank(), _axes(root, names)), mesh.mesh)


def _axes(root: DeviceMesh, names: tuple[str, ...]) -> list[int]:
    return [(root.mesh_dim_names or ()).index(name) for name in names]


def _row(ranks: Tensor, rank: int, axes: list[int]) -> Tensor:
    """Return the ranks that differ from `rank` only in their places on `axes`."""
    place = (ranks == rank).nonzero()[0].tolist()
    index = [slice(None) if i in axes else at for i, at in enumerate(place)]
    row = ranks[tuple(index)]
    return row.permute([sorted(axes).index(axis) for axis in axes])


def _text(mesh: DeviceMesh) -> str:
    axes = ", ".join(mesh.mesh_dim_names or ("no names",))
    return f"a mesh of shape {list(mesh.shape)} with the axes ({axes})"
