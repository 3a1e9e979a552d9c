"""`cp.same_rows`: ranks that share a sequence read the same rows of a dataset."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from cpcompile.errors import InputError
from cpcompile.ranks.shardings import axis_index


def same_rows(
    dataset: Any,
    mesh: DeviceMesh | None,
    *,
    axis: str | tuple[str, ...] = "cp",
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
) -> DistributedSampler[Any]:
    """Return a sampler that gives the ranks of an axis the same rows of `dataset`.

        loader = DataLoader(dataset, batch_size=4, sampler=cp.same_rows(dataset, mesh))

    It is torch's DistributedSampler, for as many replicas as there are groups of ranks
    that share rows: each group reads other rows. `sampler.set_epoch(epoch)` before each
    epoch has them shuffled anew.

    Args:
        dataset: has a length.
        mesh: the mesh with all ranks; None where there is one process.
        axis: the names of the axes whose ranks share rows: the axis of the sequence,
            and that of tensor parallelism, if there is one.
        shuffle, seed, drop_last: as for torch's DistributedSampler.

    Raises: InputError if the dataset has no length, or if `mesh` lacks ranks.
    """
    if isinstance(dataset, DataLoader | Sampler) or not isinstance(dataset, Sized):
        raise InputError(
            f"cp.same_rows: got a {type(dataset).__name__}; needed a dataset with a "
            "length: it returns a sampler, for DataLoader(dataset, "
            "sampler=cp.same_rows(dataset, mesh)). A stream of rows is split by "
            "datasets.distributed.split_dataset_by_node, for the ranks of the mesh "
            "without the axis of the sequence"
        )
    groups, place = (1, 0) if mesh is None else _groups(mesh, axis)
    return DistributedSampler(
        dataset,  # type: ignore[arg-type]  # a list will do; only its length is asked
        num_replicas=groups,
        rank=place,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
    )


def _groups(mesh: DeviceMesh, axis: str | tuple[str, ...]) -> tuple[int, int]:
    """Return the number of groups of ranks that share rows, and this rank's group."""
    axes = (axis,) if isinstance(axis, str) else axis
    shared = {axis_index(mesh, name) for name in axes}
    coordinate = mesh.get_coordinate()
    if mesh.size() != dist.get_world_size() or coordinate is None:
        raise InputError(
            f"cp.same_rows: got a mesh of {mesh.size()} ranks; needed the one with all "
            f"{dist.get_world_size()}"
        )
    groups, place = 1, 0
    for i, (size, at) in enumerate(zip(mesh.shape, coordinate, strict=True)):
        if i not in shared:
            groups, place = groups * size, place * size + at
    return groups, place
