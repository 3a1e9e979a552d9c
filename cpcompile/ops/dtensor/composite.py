"""Attention that is a composition of operators, on the local parts of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.ops.attention_spec import AttentionInputs
from cpcompile.ops.comm.head_exchange import Results
from cpcompile.ops.dtensor.dtensor_rules import alike, as_dtensors, axis_of_group
from cpcompile.ops.dtensor.local_part import dtensor_of, local_part
from cpcompile.ops.dtensor.mask_placements import (
    SEQUENCE,
    gradient_placements,
    mask_placements,
)

_library = torch.library.Library("cp", "FRAGMENT")


def define_composite(
    name: str, function: Callable[..., tuple[Tensor, Tensor]], groups: str = ""
) -> None:
    """Define an attention operator that is `function`, also for autograd and tracing.

    Without autograd, in inference mode, DTensor would look for a rule first. groups:
    further arguments, as a schema has them.
    """
    more = f", {groups}" if groups else ""
    _library.define(
        f"{name}(Tensor q, Tensor k, Tensor v, Tensor[] extras, SymInt[] sizes, "
        f"str spec, str group{more}) -> (Tensor, Tensor)"
    )
    _library.impl(name, function, "CompositeImplicitAutograd")
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    op = getattr(torch.ops.cp, name).default
    handlers[op] = lambda op, args, kwargs: function(*args, **kwargs)


def on_local_parts(
    local: Callable[[Tensor, Tensor, Tensor, AttentionInputs], Results],
    operands: tuple[Tensor, Tensor, Tensor],
    inputs: AttentionInputs,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Run `local(q, k, v, inputs)`, attention on this rank's chunks, for DTensors too.

    DTensors are brought to Shard(2) on the mesh axis of `group` and to one placement
    per batch or head on other axes, and results are DTensors of that placement.
    AOTAutograd, which traces through it, sees plain tensors from there to there. A
    log-sum-exp that is not wanted has no elements.
    """
    tensors = [*operands, *inputs.tensors.values()]
    mesh = next((x.device_mesh for x in tensors if isinstance(x, DTensor)), None)
    if mesh is None:
        out, lse = local(*operands, inputs)
        return out, out.new_empty(0) if lse is None else lse
    q, k, v = as_dtensors(operands, mesh)
    axis = axis_of_group(mesh, group)
    placements = alike((q, k, v), axis)
    if inputs.spec.score_mod:  # it is given the numbers of batch entries and heads
        placements = [Replicate() for _ in placements]
        placements[axis] = SEQUENCE
    q_part, k_part, v_part = (
        local_part(x.redistribute(placements=placements)) for x in (q, k, v)
    )
    own: dict[str, Any] = {
        name: _local_mask(name, x, mesh, placements)
        for name, x in inputs.tensors.items()
    }
    out, lse = local(q_part, k_part, v_part, replace(inputs, **own))
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    whole = _whole(out, mesh, placements, shape)
    if lse is None:
        nowhere = [Replicate()] * mesh.ndim
        return whole, _whole(out.new_empty(0), mesh, nowhere, torch.Size((0,)))
    return whole, _whole(lse, mesh, placements, shape[:-1])


def _whole(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Make the DTensor of this shape that has `local` here."""
    return dtensor_of(local, mesh, placements, shape)


def _local_mask(
    name: str, x: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> Tensor:
    """Return the part of a mask that belongs to the part of q with these placements."""
    (whole,) = as_dtensors((x,), mesh)
    own = mask_placements(name, placements, whole.shape)
    grads = gradient_placements(placements, own)
    return local_part(whole.redistribute(placements=own), grads)
