"""Compute losses of sharded values as local sums over a global count.

A mean of the ranks' means would weigh the elements of each rank differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.lengths import is_same
from cpcompile.ops.dtensor.local_part import contiguous_strides, dtensor_of, local_part

from ..graph.constant_arguments import Callee
from ..graph.loss_calls import MEAN_BY_WEIGHT, OF_CLASSES
from ..graph.memory_order import in_memory_order

_LOW = (torch.bfloat16, torch.float16)
_CLASS_LOSSES = tuple(OF_CLASSES.values())
# Losses whose elements are multiplied by their weights after the call. l1_loss forgets
# its weight under any torch function mode, so in AOTAutograd (seen in torch 2.13).
_WEIGHTED_AFTER = (F.mse_loss, F.l1_loss, F.huber_loss)


def target_placements(scores: DTensor, target: Tensor) -> tuple[Placement, ...]:
    """Return the placements that give each rank the class targets of its scores.

    scores: [N, C, ...], not split on the classes. Class probabilities have the same
    shape.
    """
    if target.is_floating_point():
        return scores.placements
    return _without_classes(scores.placements)


def broadcast_placements(
    like: DTensor, operand: Tensor
) -> tuple[Placement, ...] | None:
    """Return the placements of an operand whose elements meet `like` by broadcasting.

    None if that makes a larger result than `like`.
    """
    shift = like.ndim - operand.ndim
    if shift < 0:
        return None
    sizes = like.shape[shift:]
    for size, own in zip(sizes, operand.shape, strict=True):
        if not (is_same(own, size) or is_same(own, 1)):
            return None
    placements: list[Placement] = []
    for placement in like.placements:
        dim = getattr(placement, "dim", None)
        if dim is None:
            placements.append(placement)
        elif dim < shift or not is_same(operand.shape[dim - shift], like.shape[dim]):
            placements.append(Replicate())
        else:
            placements.append(_moved(placement, dim - shift))
    return tuple(placements)


def cp_loss(
    loss: Callee,
    scores: DTensor,
    target: DTensor,
    whole_target: Tensor | None,
    reduction: str,
    order: tuple[int, ...] | None = None,
    /,
    **options: Any,
) -> Tensor:
    """Compute a loss of torch.nn.functional as local sums over a global count.

    scores: split on any dimensions; for a loss of classes, on others than the classes.
    target: placed as `target_placements` or `broadcast_placements` say, as are the
        DTensors among the options; what is plain is the same on every rank.
    whole_target: the plain target whose classes are counted without a message.
    order: the memory order of the dimensions of unreduced values, if not their own.

    Returns: a Partial sum or mean. For float16 and bfloat16, which are added up in
        float32, it is Replicate. Without reduction, values split as the scores are.
    """
    function, mesh, placements = loss.function, scores.device_mesh, scores.placements
    is_low, whole = scores.dtype in _LOW, reduction != "none"
    operands = {name: _operand(x, placements) for name, x in options.items()}
    weight = operands.pop("weight", None) if function in _WEIGHTED_AFTER else None
    in_one = whole and not is_low and weight is None
    local = function(
        local_part(scores),
        _operand(target, placements),
        reduction="sum" if in_one else "none",
        **operands,
    )
    if weight is not None:
        local = local * weight
    if not whole:
        return _by_elements(function, local, scores, order)
    dtype = local.dtype
    if not in_one:
        local = local.sum(dtype=torch.float32 if is_low else None)
    total = _sum_of_ranks(local, scores)
    if reduction == "mean" and function in _CLASS_LOSSES:
        total = total / _class_weights(scores, target, whole_target, options)
    elif reduction == "mean":
        total = total / _element_weights(function, scores, options)
    elif reduction == "batchmean":
        total = total / scores.shape[0]
    if is_low:
        everywhere = (Replicate(),) * mesh.ndim
        total = cast(DTensor, total).redistribute(placements=everywhere).to(dtype)
    return total


def _sum_of_ranks(local: Tensor, scores: DTensor) -> Tensor:
    """Return a sum with a summand on each rank, where the scores are split."""
    summed = [Partial() if hasattr(p, "dim") else p for p in scores.placements]
    return DTensor.from_local(local, scores.device_mesh, summed, run_check=False)


def _operand(x: Any, placements: tuple[Placement, ...]) -> Any:
    """Return the local part of an operand.

    The gradient of an operand that all ranks have gets a summand from each rank.
    """
    if not isinstance(x, DTensor):
        return x
    pairs = zip(x.placements, placements, strict=True)
    return local_part(
        x,
        [Partial() if p.is_replicate() and hasattr(q, "dim") else p for p, q in pairs],
    )


def _by_elements(
    function: Callable[..., Tensor],
    local: Tensor,
    scores: DTensor,
    order: tuple[int, ...] | None,
) -> DTensor:
    """Return one value for each element, or for each target of classes."""
    placements, shape = scores.placements, scores.shape
    if function in _CLASS_LOSSES:
        placements = _without_classes(placements)
        shape = shape[:1] + shape[2:] if scores.ndim > 1 else shape[1:]
    order = order or tuple(range(local.ndim))
    strides = contiguous_strides(torch.Size(shape[dim] for dim in order))
    strides = tuple(strides[order.index(dim)] for dim in range(len(order)))
    in_order = in_memory_order(local, order)
    return dtensor_of(in_order, scores.device_mesh, placements, shape, strides)


def _element_weights(
    function: Callable[..., Tensor], scores: DTensor, options: dict[str, Any]
) -> Tensor | int:
    """Return what the mean over elements of the whole batch divides by."""
    weight = options.get("weight")
    if weight is None or function not in MEAN_BY_WEIGHT:
        return scores.numel()
    total: Tensor = weight.sum(dtype=torch.float32 if weight.dtype in _LOW else None)
    return total


def _class_weights(
    scores: DTensor,
    target: DTensor,
    whole_target: Tensor | None,
    options: dict[str, Any],
) -> Tensor | int:
    """Return what the mean over targets of classes of the whole batch divides by."""
    if target.is_floating_point():
        return scores.numel() // scores.shape[1 if scores.ndim > 1 else 0]
    ignored, weight = options["ignore_index"], options.get("weight")
    if whole_target is not None:
        return _counted(whole_target, ignored, weight)
    return _sum_of_ranks(_counted(target.to_local(), ignored, weight), scores)


def _counted(target: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    counted = target != ignored
    if weight is None:
        return counted.sum()
    return weight[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0).sum()


def _without_classes(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return the placements of a value without dimension 1, the classes."""
    return tuple(
        p if (dim := getattr(p, "dim", 0)) < 2 else _moved(p, dim - 1)
        for p in placements
    )


def _moved(placement: Placement, dim: int) -> Placement:
    """Return the same kind of split on another dimension."""
    if isinstance(placement, Shard):
        return Shard(dim)
    return type(placement)(dim, split_factor=placement.split_factor)  # type: ignore[attr-defined, call-arg]
