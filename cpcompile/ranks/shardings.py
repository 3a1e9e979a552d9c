"""Sharding annotations: `cp.shard` and `cp.unshard`, and looking up the mesh axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.errors import InputError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ranks.layout_marks import layout_of, mark
from cpcompile.ranks.mesh_factors import ULYSSES, remember_axes


def shard(
    x: Tensor,
    mesh: DeviceMesh,
    dim: int,
    axis: str | tuple[str, str] = "cp",
    layout: str = "contiguous",
) -> DTensor:
    """Shard a tensor that every rank holds in full, without communication.

    Args:
        x: the full tensor, the same on every rank of the axis.
        mesh: the device mesh; on its other axes the result is replicated.
        dim: the dimension of `x` to split, the sequence; negative counts from the end.
        axis: name of the mesh axis to split over, or names of two axes, the left one
            outside: then the result lies on the 1-D mesh of both.
        layout: which tokens each rank gets: "contiguous", "zigzag", "striped" or
            "fold", see docs/layouts.md. Except for "contiguous", the result is for
            functions compiled with backend="cp": these read the layout from it, and
            other code sees a permuted sequence.

    Returns: a DTensor with placement Shard(dim) on `axis`; rank r holds the r-th of
    `torch.chunk`'s pieces (the last ones may be shorter or empty), of `x` in the order
    of the layout. Differentiable.

    Raises: InputError if x is no plain tensor, dim is out of range, the mesh has no
    such axis, or there is no such layout.
    """
    if not isinstance(x, Tensor) or isinstance(x, DTensor):
        raise InputError(
            f"cp.shard: got a {type(x).__name__}; needed a plain full tensor"
        )
    dim = check_dim("cp.shard", x, dim)
    if not isinstance(axis, str):
        mesh, axis = flat_axis(mesh, axis), "_".join(axis)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[axis_index(mesh, axis)] = Shard(dim)
    if layout not in [choice.value for choice in Layout]:
        names = ", ".join(repr(choice.value) for choice in Layout)
        raise InputError(f"cp.shard: got layout {layout!r}; needed one of {names}")
    if layout != Layout.CONTIGUOUS.value:
        tokens = _token_layout(x, mesh, placements, Layout(layout))
        x = x.index_select(dim, tokens.permutation(x.device))
    full = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    result = full.redistribute(placements=placements)
    mark(result, Layout(layout))
    return result


def unshard(x: DTensor) -> Tensor:
    """Return the full plain tensor on every rank, in order; the inverse of `shard`.

    Differentiable.

    Raises: InputError if x is not a DTensor.
    """
    if not isinstance(x, DTensor):
        raise InputError(
            f"cp.unshard: got a {type(x).__name__}; needed a DTensor, as cp.shard makes"
        )
    full = x.full_tensor()
    layout = layout_of(x)
    if layout is Layout.CONTIGUOUS:
        return full
    tokens = _token_layout(full, x.device_mesh, x.placements, layout)
    (dim,) = (p.dim for p in x.placements if isinstance(p, Shard))
    return full.index_select(dim, tokens.inverse(full.device))


def _token_layout(
    x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], layout: Layout
) -> TokenLayout:
    ((axis, dim),) = (
        (a, p.dim) for a, p in enumerate(placements) if isinstance(p, Shard)
    )
    return TokenLayout.of(layout, x.shape[dim], mesh.size(axis))


def check_dim(where: str, x: Tensor, dim: int) -> int:
    """Return `dim` counted from the front; raise InputError if x has none such."""
    if not -x.ndim <= dim < x.ndim:
        raise InputError(
            f"{where}: got dim {dim} for a tensor of shape {tuple(x.shape)}; needed a "
            f"dimension from {-x.ndim} to {x.ndim - 1}"
        )
    return dim % x.ndim


def axis_index(mesh: DeviceMesh, axis: str) -> int:
    """Return the place of the axis called `axis`; 0 for a 1-D mesh without names.

    Raises: InputError if there is no such axis.
    """
    names = mesh.mesh_dim_names
    if names is None and mesh.ndim == 1:
        return 0
    if names is None or axis not in names:
        had = "no axis names" if names is None else f"the axes {', '.join(names)}"
        raise InputError(
            f"mesh of shape {tuple(mesh.shape)} has {had}; needed an axis {axis!r}: "
            f'name it in init_device_mesh(..., mesh_dim_names=(..., "{axis}")) or pass '
            "the name of the axis that shards the sequence"
        )
    return names.index(axis)


def flat_axis(mesh: DeviceMesh, axis: str | tuple[str, str]) -> DeviceMesh:
    """Return the 1-D mesh that shards the sequence: one axis, or two as one.

    Of two axes the left one is outside, as in the mesh.

    Raises: InputError if there is no such axis, or two are in another order.
    """
    if isinstance(axis, str):
        axis_index(mesh, axis)  # raises if there is no such axis
        return mesh if mesh.ndim == 1 else mesh[axis]
    places = [axis_index(mesh, name) for name in axis]
    if places != sorted(places):
        raise InputError(
            f"axis {axis} of a mesh with the axes {mesh.mesh_dim_names}: needed the "
            f"order of the mesh, {axis[::-1]}"
        )
    grid = mesh[axis]
    flat = grid._flatten()
    remember_axes(flat, grid)
    return flat


def factors(mesh: DeviceMesh, axis: str | tuple[str, str]) -> CPDegrees | None:
    """Return how two axes factorise the sequence; heads are split over "ulysses".

    Returns: None for a single axis, whose factors are free.

    Raises: InputError if neither axis is called "ulysses".
    """
    if isinstance(axis, str):
        return None
    if ULYSSES not in axis:
        raise InputError(
            f"axis {axis}: needed one of both to be called 'ulysses', which says over "
            "which of them heads are split: rename it in init_device_mesh"
        )
    sizes = {name: mesh.size(axis_index(mesh, name)) for name in axis}
    ulysses = sizes.pop(ULYSSES)
    inner = "ulysses" if axis[1] == ULYSSES else "ring"
    return CPDegrees(ulysses, next(iter(sizes.values())), inner)


def check_process_group() -> None:
    """Raise InputError unless torch.distributed is initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        raise InputError(
            'backend="cp" needs a process group, and there is none: start the program '
            "with torchrun and call torch.distributed.init_process_group() first"
        )


def placements_text(x: object) -> str:
    """Return a short text of where a value lies: "S(1)", "R", or "plain"."""
    if not isinstance(x, DTensor):
        return "plain"
    names = []
    for placement in x.placements:
        if isinstance(placement, Shard):
            names.append(f"S({placement.dim})")
        elif isinstance(placement, Replicate):
            names.append("R")
        else:
            names.append(str(placement))
    return ",".join(names)


def is_sequence_sharded(x: object, dim: int) -> bool:
    """Tell whether x is a DTensor that is split along dimension `dim`."""
    return isinstance(x, DTensor) and any(
        not p.is_replicate() and not p.is_partial() and getattr(p, "dim", None) == dim
        for p in x.placements
    )
