"""The edges of a sharded graph: how inputs enter and results leave it.

placeholder (plain, full)      -> cp_shard / cp_replicate      -> the graph
placeholder (local of DTensor) -> cp_from_local                -> the graph
the graph -> cp_gather         -> a plain result
the graph -> cp_to_local       -> the local part of a result that is a DTensor outside
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.geometry.lengths import LengthNotSymbolic, is_divided, is_symbol
from cpcompile.passes.graph.context import GraphInput, InputKind, OutputPlacement
from cpcompile.passes.graph.nodes import concrete_layout, fake_value, storage
from cpcompile.passes.sharding.interpreter import ShardingInterpreter


def enter_input(sharder: ShardingInterpreter, node: fx.Node, given: GraphInput) -> None:
    """Write what brings one graph input into its domain."""
    sharder.values[node] = value = fake_value(node)
    if given.kind is InputKind.DTENSOR:
        args = (node, given.placements, *_layout(value))
        node.meta["example_value"] = sharder.values[node] = value.to_local()
        call = sharder.calls.from_local if given.reduced else sharder.calls.unreduced
        wrapped = _replace_input(
            sharder, node, call, args if given.reduced else (node,)
        )
        if not value.is_floating_point():
            _make_plain(sharder, wrapped)
    elif given.kind is InputKind.FULL:
        assert given.dim is not None
        if value.is_floating_point():
            _replace_input(sharder, node, sharder.calls.shard, (node, given.dim))
        else:
            sharder.named_dims[node] = given.dim
    elif given.kind in (InputKind.PARAMETER, InputKind.ACTIVATION):
        call = sharder.calls.replicate if given.reduced else sharder.calls.unreduced
        wrapped = _replace_input(sharder, node, call, (node,))
        if given.kind is InputKind.PARAMETER:
            sharder.of_parameters.add(wrapped)


def _replace_input(
    sharder: ShardingInterpreter, node: fx.Node, call: Any, args: tuple[Any, ...]
) -> fx.Node:
    if sharder.last_entered is None:
        sharder.last_entered = node.graph.find_nodes(op="placeholder")[-1]
    with node.graph.inserting_after(sharder.last_entered):
        sharder.last_entered = wrapped = sharder.call(call, args, like=node)
    sharder.storages[wrapped] = storage(node)
    node.replace_all_uses_with(wrapped, delete_user_cb=lambda user: user is not wrapped)
    return wrapped


def _make_plain(sharder: ShardingInterpreter, ids: fx.Node) -> None:
    """Integers are plain in the graph; an embedding still looks up its own part."""
    with ids.graph.inserting_after(ids):
        plain = sharder.call(sharder.calls.gather, (ids,), like=ids)
    ids.replace_all_uses_with(plain, delete_user_cb=lambda user: user is not plain)
    sharder.sharded_ids[plain] = ids


def leave_outputs(sharder: ShardingInterpreter, graph: fx.Graph) -> None:
    """Write what brings every result out of the graph; fills `ctx.outputs`."""
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = []
    with graph.inserting_before(output):
        for result in output_nodes(graph):
            value = sharder.value(result)
            if not isinstance(value, DTensor):
                results.append(result)
                sharder.ctx.outputs.append(None)
            elif sharder.distributed_inputs or (
                _stays_sharded(value) and not sharder.ctx.gather_outputs
            ):
                results.append(_leave_local(sharder, result, value))
            else:
                if _stays_sharded(value):
                    sharder.ctx.gathered.append(f"{result.name} {list(value.shape)}")
                sharder.ctx.outputs.append(None)
                results.append(
                    sharder.call(sharder.calls.gather, (result,), like=result)
                )
    output.args = (tuple(results),)


def _leave_local(
    sharder: ShardingInterpreter, result: fx.Node, value: DTensor
) -> fx.Node:
    placements = tuple(
        p if isinstance(p, Shard) else Replicate() for p in value.placements
    )
    sharder.ctx.outputs.append(OutputPlacement(placements, *_layout(value)))
    return sharder.call(sharder.calls.to_local, (result, placements), like=result)


def _layout(
    value: DTensor,
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Global shape and strides, or None for what follows from equal shards."""
    if not any(map(is_symbol, (*value.shape, *value.stride()))):
        return concrete_layout(value)
    for axis, placement in enumerate(value.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and not is_divided(
            value.shape[dim], value.device_mesh.size(axis)
        ):
            raise LengthNotSymbolic(
                f"a DTensor of shape {list(value.shape)} with placements "
                f"{value.placements} at the edge of the graph has unequal shards"
            )
    return None, None


def output_nodes(graph: fx.Graph) -> tuple[Any, ...]:
    """What the graph returns, in order."""
    (output,) = graph.find_nodes(op="output")
    results = output.args[0]
    assert isinstance(results, tuple | list), "Dynamo's graphs return a tuple"
    return tuple(results)


def _stays_sharded(value: DTensor) -> bool:
    return not all(p.is_replicate() or p.is_partial() for p in value.placements)
