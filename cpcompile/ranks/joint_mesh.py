"""The mesh of the sequence axis and of other axes, on which a value may lie on both."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.errors import InputError


def joint_mesh(sequence: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """Return the mesh whose first axis is `sequence`, followed by the axes of `other`.

    Their groups are used; nothing is communicated. Every rank of `other` belongs to
    another group of the sequence axis.

    Raises: InputError unless both are axes of one mesh, and different ones.
    """
    root, names = other._get_root_mesh(), other.mesh_dim_names
    sequence_ranks = dist.get_process_group_ranks(sequence.get_group())
    coordinate = root.get_coordinate()
    if (
        sequence._get_root_mesh() != root
        or names is None
        or not set(names) <= set(root.mesh_dim_names or ())
        or coordinate is None
    ):
        raise InputError(
            f"the sequence is sharded over {_text(sequence)}, and parameters are "
            f"DTensors on {_text(other)}; needed two axes of one mesh: "
            'mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("cp", "tp")), '
            'with parallelize_module(model, mesh["tp"], ...) and options={"mesh": mesh}'
        )
    axes = [root.mesh_dim_names.index(name) for name in names]  # type: ignore[union-attr]
    rows = [_row(root.mesh, rank, axes) for rank in sequence_ranks]
    table = torch.stack(rows)
    if len(table.unique()) < table.numel():
        raise InputError(
            f"parameters are DTensors on {_text(other)}, which includes the axis of "
            f"the sequence, {_text(sequence)}; needed parameters on other axes, as "
            'parallelize_module(model, mesh["tp"], ...) makes them'
        )
    groups = [sequence.get_group(), *(other.get_group(i) for i in range(other.ndim))]
    own: Any = (sequence.mesh_dim_names or ("cp",))[0]
    return DeviceMesh.from_group(
        groups, sequence.device_type, mesh=table, mesh_dim_names=(own, *names)
    )


def _row(ranks: Tensor, rank: int, axes: list[int]) -> Tensor:
    """Return the ranks that differ from `rank` only in their places on `axes`."""
    place = (ranks == rank).nonzero()[0].tolist()
    index = [slice(None) if i in axes else at for i, at in enumerate(place)]
    row = ranks[tuple(index)]
    return row.permute([sorted(axes).index(axis) for axis in axes])


def _text(mesh: DeviceMesh) -> str:
    axes = ", ".join(mesh.mesh_dim_names or ("no names",))
    return f"a mesh of shape {list(mesh.shape)} with the axes ({axes})"
