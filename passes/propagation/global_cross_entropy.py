"""Cross entropy of sharded logits: local sums over a global count.

A mean of the ranks' means would weigh the tokens of each rank differently.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part


def target_placements(logits: DTensor, target: Tensor) -> tuple[Placement, ...]:
    """Where the target has to lie, so that each rank has those of its logits."""
    placements: list[Placement] = []
    for placement in logits.placements:
        dim = getattr(placement, "dim", None)
        if dim is None or target.is_floating_point():
            placements.append(placement)  # class probabilities: same shape
        else:
            placements.append(_move(placement, dim if dim == 0 else dim - 1))
    return tuple(placements)


def global_cross_entropy(
    logits: DTensor,
    local_target: DTensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """See cp_cross_entropy; logits are split on a dim that is not the class dim."""
    mesh, placements = logits.device_mesh, logits.placements
    local = F.cross_entropy(
        local_part(logits),
        local_target.to_local(),
        weight,
        ignore_index=ignore_index,
        reduction="none" if reduction == "none" else "sum",
        label_smoothing=label_smoothing,
    )
    if reduction == "none":
        shape = target.shape[:-1] if target.is_floating_point() else target.shape
        return DTensor.from_local(
            local,
            mesh,
            local_target.placements,
            run_check=False,
            shape=shape,
            stride=contiguous_strides(shape),
        )
    summed = [Partial() if hasattr(p, "dim") else p for p in placements]
    total = DTensor.from_local(local, mesh, summed, run_check=False)
    if reduction == "sum":
        return total
    return total / _mean_denominator(logits, target, weight, ignore_index)


def _mean_denominator(
    logits: DTensor, target: Tensor, weight: Tensor | None, ignore_index: int
) -> Tensor | int:
    """What F.cross_entropy(reduction="mean") divides by, over the whole batch."""
    if target.is_floating_point():
        return logits.numel() // logits.shape[1 if logits.ndim > 1 else 0]
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()


def _move(placement: Placement, dim: int) -> Placement:
    """The same kind of split on another dimension."""
    if isinstance(placement, Shard):
        return Shard(dim)
    return type(placement)(dim, split_factor=placement.split_factor)  # type: ignore[attr-defined, call-arg]
