"""Puts a relayout around every attention call whose plan wants balanced tokens.

    out = cp.ring_attention(q, k, v, ..., group)
      ->
    q, k, v = cp.relayout(q, 2, S, "contiguous", "zigzag", group), ...
    laid_out = cp.ring_attention(q, k, v, ..., group, "zigzag")
    out = cp.relayout(laid_out, 2, S, "zigzag", "contiguous", group)

This alone is right, and pays for four messages per call; cancel_relayout moves them to
where they cost nothing.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cpcompile.passes.context import Context
from cpcompile.passes.graph import all_nodes, fake_value
from cpcompile.passes.graph_writer import GraphWriter
from cpcompile.passes.insert_attention import call_of, result_of, set_layout
from cpcompile.plans import Layout

RELAYOUT = torch.ops.cp.relayout.default


def insert_relayout(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite; returns the number of relayouts."""
    inserted = 0
    writer = GraphWriter.of_sharded(graph, ctx)
    for node in list(all_nodes(graph)):
        call = call_of(node)
        if call is None or ctx.plans[call].layout is Layout.CONTIGUOUS:
            continue
        layout = ctx.plans[call].layout
        args = list(node.args)
        with node.graph.inserting_before(node):
            for index in range(3):
                operand = args[index]
                assert isinstance(operand, fx.Node)
                args[index] = relayout(writer, operand, 2, Layout.CONTIGUOUS, layout)
        node.args = tuple(args)
        set_layout(node, layout)
        result = result_of(node)
        readers = list(result.users)
        with node.graph.inserting_after(result):
            back = relayout(writer, result, 2, layout, Layout.CONTIGUOUS)
        for reader in readers:
            reader.replace_input_with(result, back)
        inserted += 4
    return inserted


def relayout(
    writer: GraphWriter, x: fx.Node, dim: int, source: Layout, target: Layout
) -> fx.Node:
    """Insert what brings the tokens along `dim` of `x` from one layout to another."""
    tokens = int(fake_value(x).shape[dim])
    args = (x, dim, tokens, source.value, target.value, writer.ctx.group_name)
    return writer.call(RELAYOUT, args, like=x)
