"""DTensor sharding rules of the cp:: operators.

Attention: on the mesh axis of the operator's own group, q, k, v, out and their
gradients are Shard(2), the sequence, and DTensor brings any other placement to that.
For cp::split_kv_attention only k and v are, and the rest is Replicate. Where every rank
has all keys, k and v are Replicate, and their gradients are sums over the ranks. On
other axes of the mesh the call is independent per batch and per head: Replicate,
Shard(0), Shard(1). Uneven sequences are fine; heads and batch must divide. Masks
follow, see mask_placements.py.

Relayout: Shard of the tokens' dimension on the axis of the group; on other axes what
splits other dimensions stays as it is, evenly or not, and the rest is Replicate.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.dtensor.mask_placements import (
    SEQUENCE,
    gradient_placements,
    mask_placements,
)
from cpcompile.ops.dtensor.mixer_rule import mixer_strategy, op_spec
from cpcompile.torch_private.distributed import OpSchema, OpStrategy, RuntimeSchemaInfo

OTHER_AXES = (Replicate(), Shard(0), Shard(1))


def axis_of_group(mesh: DeviceMesh, group: str, call: str = "cp attention") -> int:
    """Find the mesh axis of the process group called `group`; `call` is for the error.

    A mesh that was made twice has two groups of the same ranks per axis, and DTensor,
    which takes equal meshes for one, may hand us the other one's.
    """
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    for axis, axis_group in enumerate(groups):
        if axis_group.group_name == group:
            return axis
    ranks = ranks_of(group)
    for axis, axis_group in enumerate(groups):
        if ranks == dist.get_process_group_ranks(axis_group):
            return axis
    raise ValueError(
        f"{call} over group {group!r}: no axis of {mesh} has that group; pass "
        "the name of a group of the mesh that the tensors are sharded on"
    )


def ranks_of(group: str) -> list[int] | None:
    """Return the global ranks of a group; None if there is none of that name."""
    try:
        return dist.get_process_group_ranks(group_by_name(group))
    except (RuntimeError, ValueError):
        return None


def attention_strategy(op_schema: OpSchema) -> OpStrategy:
    """Apply the rule of attention, forward and backward, as the module describes it."""
    names = [x.name for x in op_schema.op._schema.arguments]
    args: dict[str, Any] = dict(zip(names, op_schema.args_schema, strict=False))
    mesh, spec = op_schema.get_mesh_from_args(), AttentionSpec.of_text(args["spec"])
    axis = axis_of_group(mesh, args["group"])
    whole_queries = op_schema.op is torch.ops.cp.split_kv_attention.default
    names = [x for x in _ATTENDED if x in args]
    attended = [args[x] for x in names]
    tensors = getattr(args["extras"], "children", args["extras"])
    extras = dict(zip(spec.extras, tensors, strict=True))
    of_lse = [args["grad_lse"]] if args.get("grad_lse") else []
    other_placements: tuple[Placement, ...] = OTHER_AXES
    if spec.score_mod:  # it is given the numbers of batch entries and heads
        other_placements = (Replicate(),)
    choices = [other_placements] * mesh.ndim
    choices[axis] = (SEQUENCE,)
    strategies = []
    for placements in itertools.product(*choices):
        if not all(divides(mesh, placements, axis, x.shape) for x in attended):
            continue
        keys = queries = placements
        if whole_queries:
            queries = _with(axis, Replicate(), queries)
        key_gradients = keys
        if spec.whole_keys:
            keys, key_gradients = (
                _with(axis, x, queries) for x in (Replicate(), Partial())
            )
        wanted = [keys if x in ("k", "v") else queries for x in names]
        wanted += [
            tuple(mask_placements(name, queries, x.shape)) for name, x in extras.items()
        ]
        wanted += [queries for _ in of_lse]
        outputs = [queries] * 2
        if "grad" in args:
            outputs = [queries, key_gradients, key_gradients]
            bias = extras.get("bias") if args["bias_grad"] else None
            outputs.append(_of_bias_gradient(placements, bias))
        strategies.append(
            op_spec([*attended, *extras.values(), *of_lse], wanted, outputs)
        )
    return OpStrategy(strategies)


def _with(
    axis: int, placement: Placement, placements: tuple[Placement, ...]
) -> tuple[Placement, ...]:
    """Return placements with another one on an axis."""
    return (*placements[:axis], placement, *placements[axis + 1 :])


_ATTENDED = ("grad", "q", "k", "v", "out", "lse")


def _of_bias_gradient(
    placements: tuple[Placement, ...], bias: OpStrategy | None
) -> tuple[Placement, ...]:
    if bias is None:
        return (Replicate(),) * len(placements)  # without elements
    own = mask_placements("bias", placements, bias.shape)
    return tuple(gradient_placements(placements, own))


def relayout_strategy(op_schema: OpSchema) -> OpStrategy:
    """Shard `dim` on the group's axis; on others keep what does not touch `dim`."""
    operand, dim, length, _, _, group = op_schema.args_schema
    assert isinstance(operand, OpStrategy), f"cp::relayout of {operand}"
    assert isinstance(group, str), f"cp::relayout over {group}"
    if not -operand.ndim <= dim < operand.ndim or operand.shape[dim] != length:
        raise ValueError(
            f"cp::relayout: got length {length} and dim {dim} for a DTensor "
            f"{tuple(operand.shape)}; needed its dimension of so many tokens. Pass the "
            "length of the whole sequence"
        )
    axis = axis_of_group(operand.mesh, group, "cp::relayout")
    tokens = Shard(dim % operand.ndim)
    placements = [
        placement
        if placement.is_shard() and not placement.is_shard(tokens.dim)
        else Replicate()
        for placement in operand.strategies[0].output_spec.placements
    ]
    placements[axis] = tokens
    own = [tuple(placements)]
    return OpStrategy([op_spec([operand], own, own, is_list=False)])


def as_dtensors(
    tensors: Sequence[Any], mesh: DeviceMesh | None = None
) -> list[DTensor]:
    """Make plain tensors among DTensors Replicate: they are the same on every rank."""
    if mesh is None:
        mesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    return [
        x
        if isinstance(x, DTensor)
        else DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        for x in tensors
    ]


def alike(operands: Sequence[DTensor], sequence_axis: int | None) -> list[Placement]:
    """Choose placements for q, k and v under which the calls are independent.

    Shard(2) on `sequence_axis`; on other axes per batch or per head, where one of the
    operands is split so and all of them divide, else replicated.
    """
    mesh = operands[0].device_mesh
    parts = {0: 1, 1: 1}
    placements: list[Placement] = []
    for axis in range(mesh.ndim):
        if axis == sequence_axis:
            placements.append(SEQUENCE)
            continue
        dim = next(
            (d for x in operands for d in (0, 1) if x.placements[axis].is_shard(d)),
            None,
        )
        count = 1 if dim is None else parts[dim] * mesh.size(axis)
        if dim is None or any(x.shape[dim] % count for x in operands):
            placements.append(Replicate())
        else:
            parts[dim] = count
            placements.append(Shard(dim))
    return placements


def divides(
    mesh: DeviceMesh, placements: tuple[Placement, ...], axis: int, shape: Any
) -> bool:
    parts = {0: 1, 1: 1}
    for other, placement in enumerate(placements):
        if other != axis and isinstance(placement, Shard):
            parts[placement.dim] *= mesh.size(other)
    return all(shape[dim] % count == 0 for dim, count in parts.items())


def register() -> None:
    """Register the rules; called once, when cpcompile.ops is imported."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    ops = torch.ops.cp
    for op in (
        ops.ring_attention.default,
        ops.ring_attention_backward.default,
        ops.all_gather_attention.default,
        ops.all_gather_attention_backward.default,
        ops.split_kv_attention.default,
    ):
        how = RuntimeSchemaInfo(3, needs_pytree=True)
        propagator.register_op_strategy(op, attention_strategy, how)
    for op, static in ((ops.mixer.default, 1), (ops.mixer_backward.default, 2)):
        how = RuntimeSchemaInfo(static, needs_pytree=True)
        propagator.register_op_strategy(op, mixer_strategy, how)
    propagator.register_op_strategy(
        ops.relayout.default, relayout_strategy, RuntimeSchemaInfo(1)
    )
