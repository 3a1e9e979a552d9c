"""Gather the inputs of a graph that cannot be sharded, and run it on every rank.

    DTensor inputs -> model -> outputs
      ->
    cp_from_local, cp_gather -> model -> full outputs, replicated DTensors outside

This is correct, with the memory and the time of one device on each rank. Plain inputs
need nothing: they are full already, and every rank computes complete gradients. A
DTensor that the program writes into, such as a cache of keys, is gathered, too, and
gets its part of what was written.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout

from ...graph.constant_arguments import MeshAxis
from ...graph.context import Context, InputKind, OutputPlacement
from ...graph.graph_pass import graph_pass
from ...graph.nodes import concrete_layout, fake_value, insert_call
from ...placement.placement_calls import cp_from_local, cp_gather, cp_gather_tokens


@graph_pass(writes=("outputs",))
def gather_graph(graph: fx.Graph, ctx: Context) -> int:
    """Gather the inputs of a graph that are DTensors; return their number.

    Raises: RewriteError for an input that is a chunk of the tokens, of which tensor
        parallelism has another on each rank.
    """
    cp_axis = MeshAxis(ctx.mesh, ctx.axis)
    for node, graph_input in ctx.inputs.items():
        if graph_input.chunks is not None:
            raise RewriteError(
                f"{node.name} is this rank's chunk of the tokens, of which tensor "
                "parallelism has another on each rank, and the graph cannot be "
                "sharded; needed options={'strict': True}, which says why"
            )
    ctx.leave_other_axes()
    gathered = 0
    for node, graph_input in ctx.inputs.items():
        is_kept = graph_input.kind is InputKind.KEPT
        if graph_input.kind is not InputKind.DTENSOR and not is_kept:
            continue
        value = fake_value(node)
        full = value.full_tensor()
        last = graph.find_nodes(op="placeholder")[-1]
        args = (node, cp_axis, graph_input.placements, *concrete_layout(value))
        with graph.inserting_after(last):
            wrapped = insert_call(graph, cp_from_local, args, like=node, value=value)
        with graph.inserting_after(wrapped):
            plain = insert_call(graph, cp_gather, (wrapped,), like=node, value=full)
            if graph_input.layout is not Layout.CONTIGUOUS:
                plain.target = cp_gather_tokens
                how: Any = (cp_axis, graph_input.tokens, graph_input.layout.value)
                plain.args = (wrapped, *how)
        for user in list(node.users):
            if user is not wrapped:
                user.replace_input_with(node, plain)
        if is_kept:  # what the program writes is written to the caller's part
            (output,) = graph.find_nodes(op="output")
            with graph.inserting_before(output):
                write = (wrapped, plain)
                insert_call(graph, cp_write_back, write, like=node, value=value)
        node.meta["example_value"] = value.to_local()
        gathered += 1
    _leave(graph, ctx, wrap=gathered > 0)
    return gathered


def cp_write_back(target: DTensor, whole: Tensor) -> DTensor:
    """Put this rank's part of a plain tensor into a DTensor, in place."""
    everywhere = [Replicate()] * target.device_mesh.ndim
    new = DTensor.from_local(whole, target.device_mesh, everywhere, run_check=False)
    part = new.redistribute(placements=target.placements)
    target._local_tensor.copy_(part._local_tensor)
    return target


def _leave(graph: fx.Graph, ctx: Context, wrap: bool) -> None:
    (output,) = graph.find_nodes(op="output")
    everywhere = (Replicate(),) * ctx.mesh.ndim
    results: Any = output.args[0]
    ctx.findings.outputs = []
    for result in results:
        value = fake_value(result)
        if not wrap or not isinstance(value, Tensor):
            ctx.findings.outputs.append(None)
        else:
            ctx.findings.outputs.append(
                OutputPlacement(everywhere, *concrete_layout(value))
            )
