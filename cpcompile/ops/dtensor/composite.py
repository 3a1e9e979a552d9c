"""Attention that is a composition of operators, on the local parts of DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.ops.dtensor.dtensor_rules import alike, as_dtensors, axis_of_group
from cpcompile.ops.dtensor.local_part import contiguous_strides, local_part

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
    local: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: str,
) -> Tensor:
    """`local(q, k, v)`, an attention on this rank's chunks, for DTensors too.

    These are brought to Shard(2) on the mesh axis of `group` and to one placement per
    batch or head on others, and the result is a DTensor of that placement. AOTAutograd,
    which traces through it, sees plain tensors from there to there.
    """
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        return local(q, k, v)
    operands = as_dtensors((q, k, v))
    mesh = operands[0].device_mesh
    placements = alike(operands, axis_of_group(mesh, group))
    parts = (local_part(x.redistribute(placements=placements)) for x in operands)
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    return DTensor.from_local(
        local(*parts),
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=contiguous_strides(shape),
    )
