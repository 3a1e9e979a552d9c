"""The ratio of the work of all ranks that share a sequence to that of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from cpcompile.geometry.lengths import expected
from cpcompile.ops.dtensor.dtensor_rules import axis_of_group
from cpcompile.ops.traced_nodes import sequence_group, sharing


def ranks_on_other_axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> int:
    """Count the ranks that share work on other mesh axes than that of the sequence.

    placements: of the result.
    """
    group, axis = sequence_group(), -1
    with suppress(ValueError):  # of a mesh of tensor parallelism alone
        axis = 0 if group is None else axis_of_group(mesh, group)
    cut = (n for n, p in enumerate(placements) if n != axis and not p.is_replicate())
    return math.prod(map(mesh.size, cut))


def sharing_rows(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    rows: int | torch.SymInt,
    local_rows: int | torch.SymInt,
) -> AbstractContextManager[None]:
    """Mark what is traced inside as work on `local_rows` of all `rows`."""
    if sequence_group() is None:
        return nullcontext()
    own = expected(local_rows) * ranks_on_other_axes(mesh, placements)
    return sharing(expected(rows) / own if own else 1.0)
