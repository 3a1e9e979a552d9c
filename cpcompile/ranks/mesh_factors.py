"""The process groups of a factorised mesh axis, for cp::hybrid_attention.

A mesh axis of N = u * r ranks is a grid: u ranks exchange heads, r form a ring. A user
whose mesh has both as axes has their groups already, see `remember_axes`; any other
factorisation gets groups of its own when it is first needed, on all ranks alike.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.geometry.degrees import CPDegrees

ULYSSES = "ulysses"  # the name of a mesh axis whose ranks exchange heads


@dataclass(frozen=True)
class HybridGroups:
    """Names of the two groups that this rank is in."""

    ulysses: str
    ring: str


_Known = dict[CPDegrees, HybridGroups]
# By the group of the axis: it ends with the process group, as the groups in it do.
_known: MutableMapping[ProcessGroup, _Known] = weakref.WeakKeyDictionary()


def hybrid_groups(mesh: DeviceMesh, axis: int, degrees: CPDegrees) -> HybridGroups:
    """Return the groups of a factorisation of the mesh axis number `axis`.

    The first call for a factorisation creates process groups: every rank of the world
    has to make it, in the same order as others.

    Raises: ValueError if `degrees` are no factorisation of the size of the axis.
    """
    if degrees.ranks != mesh.size(axis):
        raise ValueError(
            f"hybrid attention: got degrees {degrees.ulysses} (ulysses) and "
            f"{degrees.ring} (ring) for an axis of {mesh.size(axis)} ranks; needed two "
            "numbers whose product it is"
        )
    by_degrees = _known.setdefault(mesh.get_group(axis), {})
    if degrees not in by_degrees:
        by_degrees[degrees] = _create(mesh, axis, degrees)
    return by_degrees[degrees]


def known_groups(
    mesh: DeviceMesh, axis: int, degrees: CPDegrees
) -> HybridGroups | None:
    """Return the groups of a factorisation; None if they have to be made yet."""
    return _known.get(mesh.get_group(axis), {}).get(degrees)


def remember_axes(flat: DeviceMesh, grid: DeviceMesh) -> None:
    """Let `hybrid_groups` of `flat` use the groups of `grid`, which it flattens.

    `grid` has two axes. The ranks of the one called "ulysses" exchange heads. If none
    is called so, nothing is remembered.
    """
    names = grid.mesh_dim_names
    assert names is not None and len(names) == 2, f"{grid} has no two named axes"
    if ULYSSES not in names:
        return
    (ring,) = (name for name in names if name != ULYSSES)
    inner = "ulysses" if names[1] == ULYSSES else "ring"
    degrees = CPDegrees(grid[ULYSSES].size(), grid[ring].size(), inner)
    groups = HybridGroups(_name(grid, ULYSSES), _name(grid, ring))
    _known.setdefault(flat.get_group(0), {}).setdefault(degrees, groups)


def _create(mesh: DeviceMesh, axis: int, degrees: CPDegrees) -> HybridGroups:
    sizes = {"ulysses": degrees.ulysses, "ring": degrees.ring}
    outer = "ring" if degrees.inner == "ulysses" else "ulysses"
    names = (outer, degrees.inner)
    shape = tuple(sizes[name] for name in names)
    if mesh.mesh_dim_names is None:  # it has one axis then, see axis_index
        grid = DeviceMesh(mesh.device_type, mesh.mesh.view(shape))
    else:
        prefix = mesh.mesh_dim_names[axis]
        grid = mesh._unflatten(axis, shape, tuple(f"{prefix}_{name}" for name in names))
    ulysses, ring = (axis + names.index(name) for name in ("ulysses", "ring"))
    return HybridGroups(_name(grid, ulysses), _name(grid, ring))


def _name(mesh: DeviceMesh, axis: int | str) -> str:
    return str(mesh.get_group(axis).group_name)
