"""Turn the global program into a sharded one, by DTensors inside of the graph.

    tokens, weight -> embedding -> ... -> cross_entropy
      ->
    cp_replicate(weight), cp_shard(tokens, 1) -> embedding -> ... -> cp_loss
      -> cp_gather

Every node is run once on fake tensors, in order. Values are in one of two domains:
plain (the same on every rank: integers, masks, positions, buffers, what is made of
them) and DTensor (parameters, activations). A node that has only plain inputs stays as
it is. Where the domains meet, plain inputs are wrapped as Replicate, and DTensor's own
sharding propagation decides the placement of the result. `sharding_rules` decides on
calls that it cannot do or would do wrong. The interpreter has the fallback: gather,
compute on every rank, shard again.

AOTAutograd then traces through the DTensors, so that the compiled program consists of
local operators and collectives only.
"""

from __future__ import annotations

import torch.fx as fx
from torch.distributed.tensor import DTensor

from ...graph.context import Context, InputKind
from ...graph.graph_pass import graph_pass
from ...graph.nodes import fake_mode_of, fake_value, output_nodes
from ..attention.find_attention import unplanned_calls
from ..masks.unread_masks import note_unread_masks
from .graph_edges import enter_inputs, leave_outputs
from .interpreter import ShardingInterpreter


@graph_pass(
    reads=(
        "calls",
        "plans",
        "mask_rows",
        "row_parallel",
        "fallback_calls",
        "padded_results",
    ),
    writes=(
        "masks",
        "outputs",
        "gathered_results",
        "later_results",
        "cut_inputs",
        "token_origins",
        "shared",
    ),
)
def shard_graph(graph: fx.Graph, ctx: Context) -> int:
    """Shard a graph; return how many calls run on DTensors, 0 if nothing is sharded."""
    starts = any(
        graph_input.kind in (InputKind.FULL, InputKind.DTENSOR, InputKind.KEPT)
        for graph_input in ctx.inputs.values()
    )
    if not (starts or ctx.findings.plans or unplanned_calls(ctx)):
        ctx.findings.outputs = [None for _ in output_nodes(graph)]
        ctx.leave_other_axes()
        return 0
    of_user = [isinstance(fake_value(x), DTensor) for x in output_nodes(graph)]
    interpreter = ShardingInterpreter(ctx, fake_mode_of(graph))
    interpreter.read_sequence_dims(graph)
    enter_inputs(interpreter, graph)
    interpreter.run(graph)
    leave_outputs(interpreter, graph, of_user)
    for plain in interpreter.sharded_ids:
        if not plain.users:
            graph.erase_node(plain)
    for node, value in interpreter.values.items():
        node.meta["example_value"] = value
    note_unread_masks(graph, ctx)
    return interpreter.distributed
