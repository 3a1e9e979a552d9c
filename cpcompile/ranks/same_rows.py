"""`cp.same_rows`: ranks that share a sequence read the same rows of a dataset.

Samplers for data parallelism give every rank other rows. They are objects of torch or
accelerate that know a number of ranks and the place of this one. Both are set to what
they are in the mesh without the axis of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data.distributed import DistributedSampler

from cpcompile.errors import InputError
from cpcompile.ranks.shardings import axis_index

Loader = TypeVar("Loader")

# Where a loader, or what wraps one, keeps the object that shares out rows.
_INSIDE = ("base_dataloader", "_dataloader", "dataset", "batch_sampler", "sampler")


def same_rows(
    loader: Loader, mesh: DeviceMesh, *, axis: str | tuple[str, ...] = "cp"
) -> Loader:
    """Let the ranks of an axis read the same rows; changes `loader` in place.

    Args:
        loader: a DataLoader or a sampler that gives every rank other rows: of torch
            (DistributedSampler), or what accelerate, transformers' Trainer or Lightning
            Fabric have made of a DataLoader.
        mesh: the mesh with all ranks. axis: the names of the axes whose ranks share
            rows: the axis of the sequence, and that of tensor parallelism, if there is
            one.

    Returns: `loader`, whose length is the one for fewer groups of ranks: each rank gets
        the rows of its place on the other axes.

    Raises: InputError if nothing in `loader` shares rows out among all ranks, or if
        one rank reads for all (dispatch_batches).
    """
    groups, place = _groups(mesh, (axis,) if isinstance(axis, str) else axis)
    found = [x for x in _inside(loader) if _ranks_of(x) is not None]
    for x in found:
        if type(x).__name__ == "DataLoaderDispatcher":
            raise InputError(
                "cp.same_rows: the loader reads on one rank for all; needed one that "
                'reads on each: accelerator_config={"dispatch_batches": False}'
            )
        if _ranks_of(x) not in (dist.get_world_size(), groups):
            raise InputError(
                f"cp.same_rows: {type(x).__name__} shares rows out among {_ranks_of(x)}"
                f" ranks; needed all {dist.get_world_size()}"
            )
        _set_ranks(x, groups, place)
    if not found and dist.get_world_size() > 1:  # one rank may read as it is
        raise InputError(
            f"cp.same_rows: got a {type(loader).__name__} that shares no rows out; "
            "needed one of DistributedSampler or accelerate. A loader that reads alike "
            "on all ranks needs no same_rows without data parallelism"
        )
    return loader


def _groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> tuple[int, int]:
    """Return the number of groups of ranks that share rows, and this rank's group."""
    shared = {axis_index(mesh, axis) for axis in axes}
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


def _inside(loader: Any) -> Iterator[Any]:
    """Yield the loader and the objects that it reads through."""
    seen, found = set(), [loader]
    for x in found:  # a list that grows
        if id(x) in seen:
            continue
        seen.add(id(x))
        yield x
        members = (getattr(x, name, None) for name in _INSIDE)
        found += [each for each in members if each is not None]


def _ranks_of(x: Any) -> int | None:
    """Return among how many ranks x shares rows out; None if it does not."""
    if isinstance(x, DistributedSampler):
        return x.num_replicas
    if type(x).__name__ == "DataLoaderDispatcher":
        return int(x.state.num_processes)
    if type(x).__module__.startswith("accelerate."):
        found: int | None = vars(x).get("num_processes")
        return found
    return None


def _set_ranks(x: Any, groups: int, place: int) -> None:
    if not isinstance(x, DistributedSampler):
        x.num_processes, x.process_index = groups, place
        return
    x.num_replicas, x.rank = groups, place
    rows = len(x.dataset)  # type: ignore[arg-type]  # it has been asked before
    if x.drop_last:
        rows -= rows % groups
    x.num_samples = math.ceil(rows / groups)
    x.total_size = x.num_samples * groups
