"""scaled_dot_product_attention on DTensors, outside of a compiled graph too.

Without this, eager attention on a DTensor that is sharded on the sequence fails on CPU,
so that a graph break would end a program that runs when it is compiled. The handlers
stand where DTensor dispatches aten's CPU flash kernel and its backward: a sequence that
is sharded on one mesh axis runs a cp:: operator there; anything else (batch or heads
sharded, replicated) runs the kernel on local tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from cpcompile.errors import DropoutError, InputError
from cpcompile.kernels.operands import flash_operand
from cpcompile.logs import warn_of_order
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.dtensor.dtensor_rules import alike, as_dtensors
from cpcompile.ranks.layout_marks import layouts_in_use
from cpcompile.settings import setting
from cpcompile.torch_patches.tracing import dynamo_traces
from cpcompile.torch_private.distributed import StridedShard

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def register() -> None:
    """Install the handlers; DTensor has no rule of its own for these overloads."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[FORWARD] = forward_handler
    handlers[BACKWARD] = backward_handler


def forward_handler(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return (out, lse) as the flash kernel's schema says, for DTensor q, k, v."""
    dropout_p, is_causal = _optional(args, 3)
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    operands = (*args[:3], mask)  # the mask may be the only DTensor
    mesh = next(x.device_mesh for x in operands if isinstance(x, DTensor))
    q, k, v = as_dtensors(args[:3], mesh)
    axis = sequence_axis(q, k, v)
    if axis is None:
        return _run_locally(
            lambda *x: op(*x[:-1], dropout_p, is_causal, attn_mask=x[-1], scale=scale),
            (q, k, v),
            mask,
        )
    _refuse_dropout(dropout_p)
    if is_causal and layouts_in_use() and not dynamo_traces():
        at = "causal attention on a DTensor outside of a compiled graph"
        warn_of_order(at, layouts_in_use(), "compile what reads them")
    if mask is not None:
        return _with_mask(q, k, v, is_causal, mask, scale)
    cp_op = getattr(torch.ops.cp, f"{setting('eager_strategy')}_attention")
    results: tuple[Tensor, ...] = cp_op(q, k, v, *_rest(q, k, is_causal, scale, axis))
    return results


def backward_handler(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return (dq, dk, dv) as the flash kernel's schema says, for DTensor operands."""
    operands = as_dtensors(args[:6])
    _, q, k, v, _, _ = operands
    dropout_p, is_causal = _optional(args, 6)
    mask, scale = kwargs.get("attn_mask"), kwargs.get("scale")
    axis = sequence_axis(q, k, v)
    if axis is None or mask is not None:
        if axis is not None:
            operands = [_replicated(x) for x in operands]
        return _run_locally(
            lambda *x: op(*x[:-1], dropout_p, is_causal, attn_mask=x[-1], scale=scale),
            tuple(operands),
            mask,
        )
    cp_op = getattr(torch.ops.cp, f"{setting('eager_strategy')}_attention_backward")
    rest = _rest(q, k, is_causal, scale, axis)
    dq, dk, dv, _ = cp_op(*operands, *rest, False, None)
    return dq, dk, dv


def sequence_axis(*tensors: DTensor) -> int | None:
    """Find the mesh axis on which q, k or v [B, H, S, D] is sharded on S, if any."""
    axes = {
        axis
        for x in tensors
        for axis, placement in enumerate(x.placements)
        if isinstance(placement, Shard | StridedShard) and placement.dim == 2
    }
    if len(axes) > 1:
        raise InputError(
            f"attention on DTensors: q, k, v have placements "
            f"{[x.placements for x in tensors]}, so the sequence is sharded on the "
            f"mesh axes {sorted(axes)}; one axis is supported: flatten them into one"
        )
    return axes.pop() if axes else None


def _rest(
    q: DTensor, k: DTensor, is_causal: bool, scale: float | None, axis: int
) -> tuple[Any, ...]:
    """Return extras, sizes, spec and group of an attention operator."""
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    spec = AttentionSpec(scale=float(scale), is_causal=is_causal)  # it may be a symbol
    group = q.device_mesh.get_group(axis).group_name
    return [], [q.shape[2], k.shape[2]], str(spec), group


def _optional(args: tuple[Any, ...], start: int) -> tuple[float, bool]:
    """Return dropout_p and is_causal, which may be absent from the end of `args`."""
    optional = args[start:]
    dropout_p, is_causal = optional + (0.0, False)[len(optional) :]
    return dropout_p, is_causal


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise DropoutError(
            "attention on a DTensor sharded along the sequence: got "
            f"dropout_p={dropout_p}; needed 0.0, because each rank would draw its own "
            "mask. Set the model's attention dropout to 0 or call model.eval()"
        )


def _local_mask(mask: Any) -> Any:
    return _replicated(mask).to_local() if isinstance(mask, DTensor) else mask


def _replicated(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _with_mask(
    q: DTensor, k: DTensor, v: DTensor, is_causal: bool, mask: Any, scale: float | None
) -> tuple[Tensor, ...]:
    """Attend under a dense mask, gathered, on every rank: correct and slower."""
    out, lse = FORWARD(
        *(flash_operand(_replicated(x).to_local()) for x in (q, k, v)),
        0.0,
        is_causal,
        attn_mask=_local_mask(mask),
        scale=scale,
    )
    mesh, full = q.device_mesh, [Replicate()] * q.device_mesh.ndim
    wrapped = (DTensor.from_local(x, mesh, full, run_check=False) for x in (out, lse))
    return tuple(x.redistribute(placements=q.placements) for x in wrapped)


def _run_locally(
    call: Any, operands: tuple[DTensor, ...], mask: Any
) -> tuple[Tensor, ...]:
    """Run per batch and head: operands and mask take one placement per mesh axis."""
    mesh = operands[0].device_mesh
    placements = alike(operands, None)
    if mask is not None:
        (mask,) = as_dtensors((mask,), mesh)
        mask = mask.redistribute(
            placements=[_mask_placement(p, mask) for p in placements]
        ).to_local()
    parts = (x.redistribute(placements=placements).to_local() for x in operands)
    local = map(flash_operand, parts)
    return tuple(
        DTensor.from_local(x, mesh, placements, run_check=False)
        for x in call(*local, mask)
    )


def _mask_placement(placement: Placement, mask: DTensor) -> Placement:
    """Split a mask [B or 1, H or 1, S, S] with the batch or the heads it has."""
    if not isinstance(placement, Shard):
        return placement
    whole = mask.ndim < 4 or mask.shape[placement.dim] == 1
    return Replicate() if whole else placement
