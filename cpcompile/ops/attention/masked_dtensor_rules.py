"""DTensor sharding rules of the operators under a mask.

On the mesh axis of the operator's own group q, k, v, out and their gradients are
Shard(2), and so is a bias, whose rows are those of q; limits and ids are replicated.
On other axes q, k and v are replicated or split on batch or heads, as without a mask,
and a mask is split alike where it has the dimension. Where it has not, ranks that hold
other parts of the batch, or other heads, read the same mask: the gradient of a bias is
Partial there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# Private interfaces of the DTensor dispatcher, seen in torch 2.13.
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import (
    OpSchema,
    OpSpec,
    OpStrategy,
    RuntimeSchemaInfo,
)
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

from cpcompile.ops.attention.masked_contract import wants_bias_gradient
from cpcompile.ops.dtensor.dtensor_rules import (
    OTHER_AXES,
    SEQUENCE,
    axis_of_group,
    divides,
)

BIAS_DIMS = 4


def mask_placements(placements: Sequence[Placement], shape: Any) -> list[Placement]:
    """Of a field of a mask, where q, k and v have `placements`.

    Fields are [B or 1, ...]; a bias alone has four dimensions, [B or 1, H or 1, rows,
    keys].
    """

    def of(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        if placement == SEQUENCE:
            return SEQUENCE if len(shape) == BIAS_DIMS else Replicate()
        has_it = placement.dim == 0 or len(shape) == BIAS_DIMS
        return placement if has_it and shape[placement.dim] > 1 else Replicate()

    return [of(placement) for placement in placements]


def gradient_placements(
    placements: Sequence[Placement], of_bias: Sequence[Placement]
) -> list[Placement]:
    """Of the gradient of a bias, where q, k and v have `placements`."""
    return [
        Partial() if isinstance(q, Shard) and isinstance(bias, Replicate) else bias
        for q, bias in zip(placements, of_bias, strict=True)
    ]


def masked_strategy(op_schema: OpSchema) -> OpStrategy:
    """The rule of forward and backward operators; see above."""
    arguments = op_schema.args_schema
    mesh = op_schema.get_mesh_from_args()
    group = next(x for x in arguments if isinstance(x, str))
    axis = axis_of_group(mesh, group)
    first_mask = 6 if op_schema.op in _BACKWARDS else 3
    attended = [x for x in arguments[:first_mask] if isinstance(x, OpStrategy)]
    bias = arguments[first_mask]
    masks = [x for x in arguments[first_mask:] if isinstance(x, OpStrategy)]
    choices: list[tuple[Placement, ...]] = [OTHER_AXES] * mesh.ndim
    choices[axis] = (SEQUENCE,)
    found = []
    for placements in itertools.product(*choices):
        if not all(divides(mesh, placements, axis, x.shape) for x in attended):
            continue
        inputs = [_spec(x, placements) for x in attended]
        inputs += [_spec(x, mask_placements(placements, x.shape)) for x in masks]
        outputs = [DTensorSpec(mesh, placements)] * (2 if first_mask == 3 else 3)
        if first_mask != 3:
            grad: Sequence[Placement] = [Replicate()] * mesh.ndim
            if isinstance(bias, OpStrategy) and wants_bias_gradient(arguments):
                own = mask_placements(placements, bias.shape)
                grad = gradient_placements(placements, own)
            outputs.append(DTensorSpec(mesh, tuple(grad)))
        found.append(
            OpSpec(
                output_specs=tuple(outputs),
                input_specs=inputs,
                redistribute_cost=[
                    generate_redistribute_costs(x, spec)
                    for x, spec in zip([*attended, *masks], inputs, strict=True)
                ],
            )
        )
    return OpStrategy(found)


def _spec(x: OpStrategy, placements: Sequence[Placement]) -> DTensorSpec:
    meta = x.strategies[0].output_spec.tensor_meta
    return DTensorSpec(x.mesh, tuple(placements), tensor_meta=meta)


_BACKWARDS: list[Any] = []


def register() -> None:
    """Register the rules; called once, when cpcompile.ops is imported."""
    ops = torch.ops.cp
    propagator = DTensor._op_dispatcher.sharding_propagator
    _BACKWARDS.extend(
        (
            ops.masked_ring_attention_backward.default,
            ops.masked_all_gather_attention_backward.default,
        )
    )
    forwards = (
        ops.masked_ring_attention.default,
        ops.masked_all_gather_attention.default,
    )
    for op in (*forwards, *_BACKWARDS):
        propagator.register_op_strategy(op, masked_strategy, RuntimeSchemaInfo(3))
