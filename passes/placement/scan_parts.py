"""Scan in parts what is associative: a rank its own steps, from those before them.

    rank r      ys = scan(its steps)            as if there were none before
    all ranks   an all-gather of the last y of each
    rank r      ys = step(p, ys)                p: the steps of all earlier ranks

A step is associative: what it makes of the steps of earlier ranks is their last y, and
that is all that later ranks need of them, however many steps they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of, local_part

from ..graph.constant_arguments import GraphArgument, MeshAxis
from .scan_calls import Scan


def cp_scanned_in_parts(
    step: GraphArgument,
    kind: str,
    carried: int,
    scanned: int,
    *operands: DTensor,
    cp_axis: MeshAxis,
) -> list[DTensor]:
    """Scan the steps of each rank, which are a part of all of them on the axis.

    Args: as for `cp_scan`, of an associative scan whose steps read nothing else.

    Returns: results that are split along their steps as `operands` are.
    """
    whole: list[Placement] = [Replicate()] * cp_axis.mesh.ndim
    split, summed = list(whole), list(whole)
    split[cp_axis.axis], summed[cp_axis.axis] = Shard(0), Partial()
    parts = [local_part(x.redistribute(placements=split)) for x in operands]
    scan = Scan(step, kind, carried, scanned)
    own = scan.run(parts)
    last = [_from_parts(x[-1:], cp_axis, split, cp_axis.size) for x in own]
    gathered = [local_part(x.redistribute(placements=whole), summed) for x in last]
    # Ranks make the same calls, also the first one: messages have to be the same.
    rank = cp_axis.mesh.get_local_rank(cp_axis.axis)
    is_first = torch.full((), rank == 0, device=own[0].device)
    before = max(rank - 1, 0)
    earlier = [x[before : before + 1] for x in scan.run(gathered)]
    leaves = [_zero_gradient(x, is_first) for x in (*earlier, *own)]
    joined = step.graph(*leaves)
    results = [torch.where(is_first, x, y) for x, y in zip(own, joined, strict=True)]
    steps = operands[0].shape[0]
    return [_from_parts(x.contiguous(), cp_axis, split, steps) for x in results]


def _from_parts(
    x: Tensor, cp_axis: MeshAxis, placements: Sequence[Placement], steps: Any
) -> DTensor:
    shape = torch.Size((steps, *x.shape[1:]))
    return dtensor_of(x, cp_axis.mesh, placements, shape)


class _ZeroGradient(torch.autograd.Function):
    """Return x, with a gradient of zero where a flag is set, even if it was not finite.

    A step may have no finite gradient at numbers that nobody reads.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: Tensor) -> Tensor:
        ctx.save_for_backward(flag)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (flag,) = ctx.saved_tensors
        return torch.where(flag, 0.0, grads[0]), None


def _zero_gradient(x: Tensor, flag: Tensor) -> Tensor:
    return _ZeroGradient.apply(x, flag)  # type: ignore[no-any-return, no-untyped-call]
