"""Cut operands of a call that are whole as another one is cut."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.geometry.layout import Layout
from cpcompile.ops.dtensor.shares import sharing_rows

from ..graph.sequence_tokens import TokenDim
from .token_order import TokenOrder, in_order


def cut_alike(operands: list[Any], order: TokenOrder) -> list[Any]:
    """Cut operands that are whole as the first one that is cut."""
    cut = (x for x in operands if any(hasattr(p, "dim") for p in placements_of(x)))
    like = next(cut, None)
    return operands if like is None else [cut_as(x, like, order) for x in operands]


def cut_as(x: Any, like: DTensor, order: TokenOrder) -> Any:
    if not isinstance(x, Tensor):
        return x
    if any(not p.is_replicate() for p in placements_of(x)):
        return x
    mesh = like.device_mesh
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    for axis, placement in enumerate(like.placements):
        dim = getattr(placement, "dim", None)
        own = -1 if dim is None else dim + x.ndim - like.ndim  # as they broadcast
        if dim is None or own < 0 or x.shape[own] != like.shape[dim]:
            continue
        tokens = order.tokens_of(like) if axis == order.cp_axis.axis else None
        if tokens is not None and order.layout is not Layout.CONTIGUOUS:
            length, where = tokens
            x = in_order(x, TokenDim(own, where.outer), order.of_length(length))
        pieces = getattr(placement, "split_factor", 1)
        apart = x.unflatten(own, (pieces, -1)) if pieces > 1 else x
        placements = list(apart.placements)
        placements[axis] = Shard(own + (pieces > 1))
        x = apart.redistribute(placements=placements)
        x = x.flatten(own, own + 1) if pieces > 1 else x
    return x


def shared_rows(x: DTensor, dim: int) -> AbstractContextManager[None]:
    """Mark what is traced inside as work on this rank's rows of x."""
    rows, own = x.shape[dim], x._local_tensor.shape[dim]
    return sharing_rows(x.device_mesh, x.placements, rows, own)


def placements_of(x: Any) -> tuple[Placement, ...]:
    return x.placements if isinstance(x, DTensor) else ()


def local_of(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x
