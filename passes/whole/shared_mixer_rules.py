"""Mixers that ranks share: tokens exchanged for heads, and states that are passed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.ops.shared_mixers import (
    ALL,
    IN_PARTS,
    IN_PARTS_BACKWARD,
    SPLIT_ALONG,
)

from ..graph.constant_arguments import GraphArgument, MeshAxis
from ..placement.placement_calls import cp_mixed_in_parts, cp_replicate
from ..placement.scan_calls import SCAN, cp_scan


def shared_mixer_rules(cp_axis: MeshAxis) -> dict[Any, Callable[..., Any]]:
    """Return the rules, by call."""
    rules: dict[Any, Callable[..., Any]] = {
        SPLIT_ALONG: _split_along,
        IN_PARTS: _in_parts,
        IN_PARTS_BACKWARD: _in_parts_backward,
        torch.ops.higher_order.scan: _scan,
    }
    return {call: functools.partial(rule, cp_axis) for call, rule in rules.items()}


def _split_along(cp_axis: MeshAxis, x: Any, source: int, target: int) -> Any:
    """Bring x to where it is wanted, wherever it is."""
    if not isinstance(x, DTensor):
        return x.clone()  # dense, as the call's result is in the whole graph
    placements = list(x.placements)
    now, axis = placements[cp_axis.axis], cp_axis.axis
    placements[axis] = Replicate() if target == ALL else Shard(target)
    if now != Shard(source) or target in (ALL, source):
        return x.redistribute(placements=placements)
    local = torch.ops.cp.dim_exchange(
        x._local_tensor.contiguous(),
        *(source, x.shape[source], target, x.shape[target]),
        cp_axis.mesh.get_group(axis).group_name,
    )
    return dtensor_of(local, x.device_mesh, placements, x.shape)


def _in_parts(cp_axis: MeshAxis, tensors: Sequence[Any], call: str) -> Any:
    return cp_mixed_in_parts(_distributed(cp_axis, tensors), call, cp_axis)


def _in_parts_backward(
    cp_axis: MeshAxis,
    grads: Sequence[Any],
    tensors: Sequence[Any],
    graded: Sequence[int],
    needed: Sequence[int],
    call: str,
) -> Any:
    """Differentiate what ranks do forward; calls that are there already are joined."""
    with torch.enable_grad():
        leaves: list[Any] = [x.detach() for x in _distributed(cp_axis, tensors)]
        for i in needed:
            leaves[i].requires_grad_()
        results = cp_mixed_in_parts(leaves, call, cp_axis)
    outputs = [results[i] for i in graded]
    given = [
        g.redistribute(placements=x.placements)
        for g, x in zip(_distributed(cp_axis, grads), outputs, strict=True)
    ]
    inputs = [leaves[i] for i in needed]
    return list(torch.autograd.grad(outputs, inputs, given))


def _scan(
    cp_axis: MeshAxis,
    step: Any,
    carries: Sequence[Any],
    slices: Sequence[Any],
    others: Sequence[Any] = (),
) -> list[Any]:
    """Scan the entries that a rank has, as of channels."""
    counts = len(carries), len(slices)
    operands = _distributed(cp_axis, [*carries, *slices, *others])
    return cp_scan(GraphArgument(step), SCAN, *counts, *operands)


def _distributed(cp_axis: MeshAxis, tensors: Sequence[Any]) -> list[DTensor]:
    return [x if isinstance(x, DTensor) else cp_replicate(x, cp_axis) for x in tensors]
