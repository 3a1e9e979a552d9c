"""Mixers that ranks share, and the steps of attention on latents.

Tokens are exchanged for heads, or states are passed. Steps of cp_whole::latent_keys:

    gather: DTensor -> the whole, as a plain tensor       sum: plain -> DTensor, Partial
    keys: plain -> DTensor, Replicate       summand: DTensor, Partial -> plain

Between them calls run on plain tensors, as on one device: forward on the same numbers
on every rank, backward each on its summand of the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cpcompile.ops.dtensor.local_part import dtensor_of
from cpcompile.ops.latent_steps import LatentStep
from cpcompile.ops.shared_mixers import BEGUN, IN_PARTS, IN_PARTS_BACKWARD, SPLIT_ALONG

from ..graph.constant_arguments import GraphArgument, MeshAxis
from ..placement.placement_calls import cp_mixed_in_parts, cp_replicate
from ..placement.scan_calls import SCAN, cp_scan
from .edges import share_of


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
    if target == BEGUN:  # the gradient of what ranks have taken their tokens of
        target = source
    placements[axis] = Replicate() if target < 0 else Shard(target)
    if now != Shard(source) or target < 0 or target == source:
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


def latent_step(cp_axis: MeshAxis, x: Any, step: str) -> Tensor:
    """Take a step."""
    mesh = cp_axis.mesh
    if step in (LatentStep.GATHER, LatentStep.SUMMAND):
        if not isinstance(x, DTensor):
            assert step == LatentStep.GATHER, "what attention reads is on the mesh"
            return x  # type: ignore[no-any-return]
        everywhere = [Replicate()] * mesh.ndim
        is_sum = step == LatentStep.SUMMAND
        mine = share_of(x, 1) if is_sum else x.redistribute(placements=everywhere)
        return mine._local_tensor
    if isinstance(x, DTensor):
        return x
    placement = Partial() if step == LatentStep.SUM else Replicate()
    return DTensor.from_local(x, mesh, [placement] * mesh.ndim, run_check=False)
