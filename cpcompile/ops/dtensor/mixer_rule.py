"""DTensor's sharding rule of cp::mixer, from what is claimed of the function.

On each axis of the mesh all operands and results are split along one independent
dimension, or all are whole. An operand without that dimension, or with one entry for
all, is whole, and its gradient is a sum over the parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from cpcompile.ops.mixers.mixer_call import MixerCall
from cpcompile.torch_private.distributed import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    generate_redistribute_costs,
)

_WHOLE: Mapping[str, int] = {}


def mixer_strategy(op_schema: OpSchema) -> OpStrategy:
    """Apply the rule, forward and backward."""
    arguments = op_schema.op._schema.arguments
    args: dict[str, Any] = {
        x.name: value
        for x, value in zip(arguments, op_schema.args_schema, strict=False)
    }
    call = MixerCall.of_text(args["call"])
    mesh = op_schema.get_mesh_from_args()
    tensors = _children(args["tensors"])
    operands = list(zip(call.names, tensors, strict=True))
    results = call.result_names
    if "grads" in args:
        graded = [results[i] for i in _children(args["graded"])]
        operands = [*zip(graded, _children(args["grads"]), strict=True), *operands]
        needed = [(call.names[i], tensors[i].shape) for i in _children(args["needed"])]
    dims = [_WHOLE, *call.mixer.independent.values()]
    strategies = []
    for choice in itertools.product(dims, repeat=mesh.ndim):
        if not all(
            _may_split(call, dim, tensors, mesh.size(axis), choice.count(dim))
            for axis, dim in enumerate(choice)
            if dim is not _WHOLE
        ):
            continue
        if "grads" in args:
            outputs = [_placements(choice, x, shape, True) for x, shape in needed]
        else:
            outputs = [_placements(choice, x, None, False) for x in results]
        wanted = [_placements(choice, x, y.shape, False) for x, y in operands]
        strategies.append(op_spec([x for _, x in operands], wanted, outputs))
    return OpStrategy(strategies)


def _children(x: Any) -> Sequence[Any]:
    return getattr(x, "children", x)  # type: ignore[no-any-return]


def _may_split(
    call: MixerCall,
    dim: Mapping[str, int],
    tensors: Sequence[OpStrategy],
    ranks: int,
    times: int,
) -> bool:
    """Tell whether the parts of all operands have the same entries."""
    if times > 1 or not all(name in dim for name in call.result_names):
        return False
    sizes = {
        x.shape[dim[name]]
        for name, x in zip(call.names, tensors, strict=True)
        if name in dim and dim[name] < len(x.shape)
    } - {1}
    if len(sizes) == 1:
        return True
    return bool(sizes) and all(size % ranks == 0 for size in sizes)


def _placements(
    choice: Sequence[Mapping[str, int]],
    name: str,
    shape: Sequence[Any] | None,
    is_gradient: bool,
) -> tuple[Placement, ...]:
    """Return the placements of a tensor; a result has all entries of its dimension."""
    placements: list[Placement] = []
    for dim in choice:
        at = dim.get(name)
        if at is not None and shape is not None and at >= len(shape):
            at = None
        if at is not None and (shape is None or shape[at] != 1):
            placements.append(Shard(at))
        elif is_gradient and dim is not _WHOLE:
            placements.append(Partial())
        else:
            placements.append(Replicate())
    return tuple(placements)


def op_spec(
    operands: Sequence[OpStrategy],
    wanted: Sequence[tuple[Placement, ...]],
    outputs: Sequence[tuple[Placement, ...]],
    is_list: bool = True,
) -> OpSpec:
    """Make a spec with the placements wanted of operands, and those of results."""
    mesh = operands[0].mesh
    inputs = [
        DTensorSpec(mesh, own, tensor_meta=x.strategies[0].output_spec.tensor_meta)
        for x, own in zip(operands, wanted, strict=True)
    ]
    results = tuple(DTensorSpec(mesh, own) for own in outputs)
    return OpSpec(
        output_specs=results if is_list else results[0],
        input_specs=inputs,
        redistribute_cost=[
            generate_redistribute_costs(x, spec)
            for x, spec in zip(operands, inputs, strict=True)
        ],
    )
