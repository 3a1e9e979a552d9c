"""Attention that is a composition of operators, on the local parts of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from cpcompile.ops.dtensor.dtensor_rules import alike, as_dtensors, axis_of_group
from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part
from cpcompile.ops.dtensor.mask_placements import (
    OF_HEADS,
    gradient_placements,
    mask_placements,
)
from cpcompile.ops.step.row_mask import MASK_FIELDS, MaskOperands

_library = torch.library.Library("cp", "FRAGMENT")


def define_composite(schema: str, function: Callable[..., Tensor]) -> None:
    """Define an operator of cp:: that is `function`, also for autograd and tracing.

    Without autograd, in inference mode, DTensor would look for a rule first.
    """
    name = _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    op = getattr(torch.ops.cp, name.split("::")[-1]).default
    handlers[op] = lambda op, args, kwargs: function(*args, **kwargs)


def on_local_parts(
    local: Callable[[Tensor, Tensor, Tensor, MaskOperands], Tensor],
    operands: tuple[Tensor, Tensor, Tensor],
    masks: MaskOperands,
    group: str,
) -> Tensor:
    """Run `local(q, k, v, masks)`, attention on this rank's chunks, for DTensors too.

    DTensors are brought to Shard(2) on the mesh axis of `group` and to one placement
    per batch or head on other axes, and the result is a DTensor of that placement.
    AOTAutograd, which traces through it, sees plain tensors from there to there.
    """
    tensors = [*operands, *masks[:4], masks.seeds, masks.sinks]
    mesh = next((x.device_mesh for x in tensors if isinstance(x, DTensor)), None)
    if mesh is None:
        return local(*operands, masks)
    q, k, v = as_dtensors(operands, mesh)
    placements = alike((q, k, v), axis_of_group(mesh, group))
    q_part, k_part, v_part = (
        local_part(x.redistribute(placements=placements)) for x in (q, k, v)
    )
    own = masks._replace(
        **{  # type: ignore[arg-type]  # these are tensors
            name: _local_mask(name, x, mesh, placements)
            for name in (*MASK_FIELDS, *OF_HEADS)
            if (x := getattr(masks, name)) is not None
        }
    )
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    return DTensor.from_local(
        local(q_part, k_part, v_part, own),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )


def _local_mask(
    name: str, x: Tensor, mesh: DeviceMesh, placements: list[Placement]
) -> Tensor:
    """Return the part of a mask that belongs to the part of q with these placements."""
    (whole,) = as_dtensors((x,), mesh)
    own = mask_placements(name, placements, whole.shape)
    grads = gradient_placements(placements, own)
    return local_part(whole.redistribute(placements=own), grads)
