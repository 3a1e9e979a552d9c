"""Write the edges of a sharded graph: how inputs enter and results leave it.

placeholder (plain, full)      -> cp_shard / cp_replicate      -> the graph
placeholder (local of DTensor) -> cp_from_local                -> the graph
the graph -> cp_gather         -> a plain result
the graph -> cp_to_local       -> the local part of a result that is a DTensor outside
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.options import GradSync
from cpcompile.torch_private.fake_tensors import is_traceable_wrapper_subclass

from ...graph.context import (
    PARAMETERS,
    GraphInput,
    InputKind,
    OutputPlacement,
)
from ...graph.new_call import NewCall
from ...graph.nodes import (
    fake_value,
    layout_outside,
    output_nodes,
    storage,
)
from ...graph.sequence_tokens import TokenDim
from ...placement.graph_writer import GraphWriter
from ...placement.joint_calls import (
    cp_tp_enter,
    cp_tp_leave,
    cp_tp_leave_chunks,
    cp_tp_regular,
    joint_mesh_on,
)
from ...placement.placement_calls import (
    cp_from_local,
    cp_gather,
    cp_replicate,
    cp_shard,
    cp_share_of_gradient,
    cp_to_local,
    cp_unreduced,
)
from .later_results import later_result
from .program_outputs import is_gathered


def enter_inputs(writer: GraphWriter, graph: fx.Graph) -> None:
    """Write the calls that bring every input into its domain, plain or DTensor."""
    last = next(reversed(graph.find_nodes(op="placeholder")), None)
    for node, graph_input in writer.ctx.inputs.items():
        if graph_input.kind is InputKind.OTHER_AXES:
            writer.joint_with(fake_value(node).device_mesh)
    for node, graph_input in writer.ctx.inputs.items():
        value = fake_value(node)
        local = value.to_local() if graph_input.is_dtensor else value
        node.meta["example_value"] = writer.values[node] = local
        if graph_input.kind is InputKind.FULL and not value.is_floating_point():
            assert graph_input.dim is not None
            writer.sequence_dims[node] = TokenDim(graph_input.dim)
            continue
        call = _entering(writer, node, graph_input, value)
        if call is None:
            continue
        with graph.inserting_after(last):
            last = wrapped = writer.call(call.target, call.args, like=node)
        writer.storages[wrapped] = storage(node)
        _read_instead(node, wrapped)
        if graph_input.kind in PARAMETERS:
            writer.of_parameters.add(wrapped)
        if graph_input.kind is InputKind.DTENSOR and not value.is_floating_point():
            _make_plain(writer, wrapped)


def _entering(
    writer: GraphWriter, node: fx.Node, graph_input: GraphInput, value: Any
) -> NewCall | None:
    """Return the call that makes a DTensor of an input; None if it stays plain."""
    if graph_input.kind is InputKind.OTHER_AXES:
        return _from_other_axes(writer, node, graph_input, value)
    if graph_input.kind in (InputKind.PLAIN, InputKind.LOCAL_PART):
        return None
    if is_traceable_wrapper_subclass(value) and not graph_input.is_dtensor:
        is_share = graph_input.gradient is GradSync.NONE  # wrapped where it is read
        return (
            NewCall(cp_share_of_gradient, (node, writer.cp_axis)) if is_share else None
        )
    if graph_input.kind is InputKind.KEPT:
        return NewCall(
            cp_from_local,
            (node, writer.cp_axis, graph_input.placements, *layout_outside(value)),
        )
    if graph_input.kind is InputKind.FULL:
        return NewCall(cp_shard, (node, writer.cp_axis, graph_input.dim))
    if (
        graph_input.kind is InputKind.DTENSOR
        and graph_input.gradient is GradSync.REDUCE
    ):
        return NewCall(
            cp_from_local,
            (node, writer.cp_axis, graph_input.placements, *layout_outside(value)),
        )
    return replicated(writer, node, graph_input)


def enter_gathered(writer: GraphWriter, node: fx.Node, source: str) -> None:
    """Let what a call gathers of an input enter as a parameter does.

    See Note [Sharded parameters].
    """
    args = writer.value(node.args)
    value = writer.trial.must_run(writer.callable(node), args, {})
    writer.values[node] = value
    if not value.requires_grad:
        return
    (graph_input,) = (x for n, x in writer.ctx.inputs.items() if n.name == source)
    writer.of_parameters.add(node)
    writer.insert_after(node, replicated(writer, node, graph_input))


def replicated(writer: GraphWriter, x: fx.Node, graph_input: GraphInput) -> NewCall:
    """Make a value of an input Replicate, with the gradient that the input gets."""
    if graph_input.gradient is GradSync.AVERAGE:
        return NewCall(cp_unreduced, (x, writer.cp_axis, writer.cp_axis.mesh.size()))
    if graph_input.gradient is GradSync.NONE:
        return NewCall(cp_unreduced, (x, writer.cp_axis))
    return NewCall(cp_replicate, (x, writer.cp_axis))


def _from_other_axes(
    writer: GraphWriter, node: fx.Node, graph_input: GraphInput, value: DTensor
) -> NewCall:
    """Return the call by which a DTensor of tensor parallelism enters."""
    joint = writer.joint_with(value.device_mesh)
    factors = {GradSync.AVERAGE: writer.cp_axis.mesh.size(), GradSync.NONE: 1}
    shape, stride = tuple(value.shape), tuple(value.stride())
    factor = factors.get(graph_input.gradient, 0)
    return NewCall(
        cp_tp_enter, (node, joint.joint, value.placements, shape, stride, factor)
    )


def _make_plain(writer: GraphWriter, ids: fx.Node) -> None:
    """Make integers plain in the graph; an embedding still looks up its own part."""
    with ids.graph.inserting_after(ids):
        plain = writer.call(cp_gather, (ids,), like=ids)
    _read_instead(ids, plain)
    writer.sharded_ids[plain] = ids


def _read_instead(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by, delete_user_cb=lambda user: user is not by)


def leave_outputs(
    writer: GraphWriter, graph: fx.Graph, on_other_axes: Sequence[bool]
) -> None:
    """Write the calls that bring every result out; fill `findings.outputs`.

    on_other_axes: which results are DTensors of the user.
    """
    (output,) = graph.find_nodes(op="output")
    results: list[Any] = []
    with graph.inserting_before(output):
        of_outputs = zip(output_nodes(graph), on_other_axes, strict=True)
        for number, (result, of_user) in enumerate(of_outputs):
            value = writer.value(result)
            if writer.is_joint(value):
                if of_user:
                    results.append(_leave_on_other_axes(writer, result, value))
                    continue
                if writer.ctx.keeps_layout:
                    results.append(_leave_chunks(writer, result, value))
                    continue
                result = writer.call(
                    cp_tp_regular, (result, writer.cp_axis), like=result
                )
                value = writer.value(result)
            if not isinstance(value, DTensor):
                results.append(result)
                writer.ctx.findings.outputs.append(None)
            elif (writer.ctx.takes_dtensors or writer.ctx.keeps_layout) or (
                _stays_sharded(value) and not is_gathered(result, value, writer.ctx)
            ):
                later = later_result(writer, number, result, value)
                if later is not None:
                    result, after = later
                    value = writer.value(result)
                    writer.ctx.findings.later_results.append(after)
                results.append(_leave_local(writer, result, value))
            else:
                if _stays_sharded(value):
                    writer.ctx.findings.gathered_results.append(
                        f"{result.name} {list(value.shape)}"
                    )
                writer.ctx.findings.outputs.append(None)
                results.append(writer.call(cp_gather, (result,), like=result))
    output.args = (tuple(results),)


def _leave_local(writer: GraphWriter, result: fx.Node, value: DTensor) -> fx.Node:
    placements = tuple(
        p if isinstance(p, Shard) else Replicate() for p in value.placements
    )
    writer.ctx.findings.outputs.append(
        OutputPlacement(placements, *layout_outside(value))
    )
    return writer.call(cp_to_local, (result, placements), like=result)


def _leave_on_other_axes(
    writer: GraphWriter, result: fx.Node, value: DTensor
) -> fx.Node:
    joint = joint_mesh_on(writer.ctx, value.device_mesh)
    placements = tuple(
        Replicate() if p.is_partial() else p for p in value.placements[1:]
    )
    layout = (tuple(value.shape), tuple(value.stride()))
    placement = OutputPlacement(placements, *layout, mesh=joint.other)
    writer.ctx.findings.outputs.append(placement)
    return writer.call(cp_tp_leave, (result,), like=result)


def _leave_chunks(writer: GraphWriter, result: fx.Node, value: DTensor) -> fx.Node:
    layout = (tuple(value.shape), tuple(value.stride()))
    mesh = value.device_mesh
    placement = OutputPlacement(value.placements, *layout, mesh=mesh)
    writer.ctx.findings.outputs.append(placement)
    return writer.call(cp_tp_leave_chunks, (result,), like=result)


def _stays_sharded(value: DTensor) -> bool:
    return not all(p.is_replicate() or p.is_partial() for p in value.placements)
