"""Turns the global program into a sharded one, by DTensors inside of the graph.

    tokens, weight -> embedding -> ... -> cross_entropy
      ->
    cp_replicate(weight), cp_shard(tokens, 1) -> embedding -> ... -> cp_cross_entropy
      -> cp_gather

Every node is run once on fake tensors, in order. Values are in one of two domains:
plain (the same on every rank: integers, masks, positions, buffers, what is made of
them) and DTensor (parameters, activations). A node that has only plain inputs stays as
it is. Where the domains meet, plain inputs are wrapped as Replicate, and DTensor's own
sharding propagation decides the placement of the result. What it cannot do, or would
do wrong, is the business of `sharding_rules`, which also holds the fallback: gather,
compute on every rank, shard again.

AOTAutograd then traces through the DTensors, so that the compiled program consists of
local operators and collectives only.
"""

from __future__ import annotations

import torch.fx as fx

from cpcompile.passes.attention.find_attention import unplanned_calls
from cpcompile.passes.graph.attention_calls import is_attention
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.passes.graph.nodes import fake_mode_of, is_in_place
from cpcompile.passes.sharding.functionalise_writes import steps_to_part
from cpcompile.passes.sharding.graph_edges import (
    enter_input,
    leave_outputs,
    output_nodes,
)
from cpcompile.passes.sharding.interpreter import ShardingInterpreter
from cpcompile.passes.sharding.sharding_rules import (
    RULES,
    left_attention,
    warn_about_whole,
)
from cpcompile.passes.sharding.write_rules import in_place, write_part


def shard_graph(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite; returns how many calls run on DTensors, 0 if nothing is sharded."""
    starts = any(
        given.kind in (InputKind.FULL, InputKind.DTENSOR)
        for given in ctx.inputs.values()
    )
    if not (starts or ctx.plans or unplanned_calls(ctx)):
        ctx.outputs = [None for _ in output_nodes(graph)]
        return 0
    sharder = ShardingInterpreter(ctx, fake_mode_of(graph), _Rules())
    sharder.read_sequence_dims(graph)
    for node, given in ctx.inputs.items():
        enter_input(sharder, node, given)
    sharder.run(graph)
    leave_outputs(sharder, graph)
    for plain in sharder.sharded_ids:
        if not plain.users:
            graph.erase_node(plain)
    for node, value in sharder.values.items():
        node.meta["example_value"] = value
    return sharder.distributed


class _Rules:
    """All rules, see `interpreter.Rules`."""

    def of_plain(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """An attention call left as it is, and ids that an embedding looks up."""
        if is_attention(node):
            warn_about_whole(unplanned_calls(sharder.ctx).get(node))
        return self.by_target(sharder, node)

    def of_distributed(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """Attention that was not rewritten, and writes."""
        if is_attention(node):
            left_attention(sharder, node)
        elif is_in_place(node):
            in_place(sharder, node)
        elif (steps := steps_to_part(node)) is not None:
            write_part(sharder, node, steps)
        else:
            return False
        return True

    def by_target(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """See sharding_rules.py."""
        rule = RULES.get(node.target)
        return rule is not None and rule(sharder, node)
