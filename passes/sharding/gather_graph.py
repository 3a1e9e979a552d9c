"""What is left when a graph cannot be sharded: gather its inputs, run it on every rank.

    DTensor inputs -> model -> outputs
      ->
    cp_from_local, cp_gather -> model -> full outputs, replicated DTensors outside

Correct, with the memory and the time of one device on each rank. Plain inputs need
nothing: they are full already, and every rank computes complete gradients.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import Replicate

from cpcompile.errors import CannotRewrite
from cpcompile.passes.graph.context import Context, InputKind, OutputPlacement
from cpcompile.passes.graph.nodes import concrete_layout, fake_value, insert_call
from cpcompile.passes.propagation.placement_calls import placement_calls
from cpcompile.plans import Layout


def gather_graph(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite; returns the number of inputs that are gathered."""
    calls = placement_calls(ctx)
    for node, given in ctx.inputs.items():
        if given.kind is InputKind.KEPT:
            raise CannotRewrite(
                f"{node.name} is a DTensor into which the program writes, and the "
                "graph cannot be sharded; needed options={'strict': True}, which says "
                "why, or a cache that is whole on every rank"
            )
        if given.kind is InputKind.OTHER_AXES and given.placements:
            raise CannotRewrite(
                f"{node.name} is this rank's chunk of the tokens, of which tensor "
                "parallelism has another on each rank, and the graph cannot be "
                "sharded; needed options={'strict': True}, which says why"
            )
    ctx.leave_other_axes()
    gathered = 0
    for node, given in ctx.inputs.items():
        if given.kind is not InputKind.DTENSOR:
            continue
        value = fake_value(node)
        full = value.full_tensor()
        last = graph.find_nodes(op="placeholder")[-1]
        args = (node, given.placements, *concrete_layout(value))
        with graph.inserting_after(last):
            wrapped = insert_call(graph, calls.from_local, args, like=node, value=value)
        with graph.inserting_after(wrapped):
            plain = insert_call(graph, calls.gather, (wrapped,), like=node, value=full)
            if given.layout is not Layout.CONTIGUOUS:
                plain.target = calls.gather_tokens
                plain.args = (wrapped, given.tokens, given.layout.value)
        for user in list(node.users):
            if user is not wrapped:
                user.replace_input_with(node, plain)
        node.meta["example_value"] = value.to_local()
        gathered += 1
    _leave(graph, ctx, wrap=gathered > 0)
    return gathered


def _leave(graph: fx.Graph, ctx: Context, wrap: bool) -> None:
    (output,) = graph.find_nodes(op="output")
    everywhere = (Replicate(),) * ctx.mesh.ndim
    results: Any = output.args[0]
    ctx.outputs = []
    for result in results:
        value = fake_value(result)
        if not wrap or not isinstance(value, Tensor):
            ctx.outputs.append(None)
        else:
            ctx.outputs.append(OutputPlacement(everywhere, *concrete_layout(value)))
