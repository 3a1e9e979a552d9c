"""Rows that are written into a tensor that is cut along them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.geometry.layout import Chunks


def rows_of_rank(
    whole: DTensor, rows: Any, dim: int, index: Any
) -> tuple[Tensor, Tensor] | None:
    """Return (places, rows) of whole[.., index, ..] = rows in this rank's part.

    index: in dimension `dim`, int64 [n], the same on every rank, or a slice. rows: the
    same on every rank, or a DTensor; [.., n, ..] or what expands to it.
    """
    length, local, mesh = whole.shape[dim], whole._local_tensor, whole.device_mesh
    if isinstance(index, slice):
        index = torch.arange(*index.indices(length), device=local.device)
    count, n = local.shape[dim], index.shape[0]
    if not isinstance(rows, DTensor):
        everywhere = [Replicate()] * mesh.ndim
        rows = DTensor.from_local(rows, mesh, everywhere, run_check=False)
    placements = [Replicate() if p == Shard(dim) else p for p in whole.placements]
    rows = rows.expand((*whole.shape[:dim], n, *whole.shape[dim + 1 :]))
    # By all ranks, also by one without a part.
    rows = rows.redistribute(placements=placements).to_local().to(whole.dtype)
    if not (count and n):
        return None
    axis = whole.placements.index(Shard(dim))
    start = Chunks(length, mesh.size(axis)).start(mesh.get_local_rank(axis))
    place = torch.where(index < 0, index + length, index) - start
    mine = (place >= 0) & (place < count)
    # Every rank writes n rows: its own, and in place of each row of another rank one of
    # its own again, or, if it has none, what is there already.
    first = mine.to(torch.int8).argmax(0, keepdim=True)
    source = torch.where(mine, torch.arange(n, device=mine.device), first)
    target = torch.where(mine, place, place.index_select(0, first).clamp(0, count - 1))
    old = local.index_select(dim, target)
    return target, torch.where(mine.any(), rows.index_select(dim, source), old)
