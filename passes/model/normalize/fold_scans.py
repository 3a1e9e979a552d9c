"""Write scans, torch's higher-order operators, as calls that DTensors can make.

    scan = torch.ops.higher_order.scan(step, [carry], [x], [weight])
      ->
    cp_scan = cp_scan('scan', 1, 1, carry, x, weight)

DTensor has no rule for these operators. One step is tried on DTensors; if nothing
moves, a rank scans the entries that it has (channels, rows of a batch), else the scan
is gathered. Where gradients are needed, steps of an associative scan are made one by
one: torch's gradient of the operator is wrong if results depend on each other's
operands, and its memory is quadratic in their number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ...graph.constant_arguments import GraphArgument
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_graphs, attribute_value, fake_value, insert_call
from ...placement.scan_calls import ASSOCIATIVE_SCAN, SCAN, cp_scan


@graph_pass()
def fold_scans(graph: fx.Graph, ctx: Context) -> int:
    """Replace every scan; return how many there are."""
    nodes = [x for each in all_graphs(graph) for x in each.nodes]
    found = [x for x in nodes if _kind(x)]
    for node in found:
        _fold(node)
    for node in nodes if found else ():
        if node.target is torch.select_copy and not node.users:
            node.graph.erase_node(node)  # Dynamo's, to trace a step on
    return len(found)


def _kind(node: fx.Node) -> str | None:
    higher_order = torch.ops.higher_order
    if node.target is higher_order.scan:
        return SCAN
    return ASSOCIATIVE_SCAN if node.target is higher_order.associative_scan else None


def _fold(node: fx.Node) -> None:
    kind = _kind(node)
    arguments: tuple[Any, ...] = node.args
    step, *operands = arguments
    carries = operands.pop(0) if kind == SCAN else []
    slices, others = operands
    args = (
        GraphArgument(attribute_value(step)),
        kind,
        len(carries),
        len(slices),
        *carries,
        *slices,
        *others,
    )
    with node.graph.inserting_before(node):
        new = insert_call(node.graph, cp_scan, args, like=node, value=fake_value(node))
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    if not step.users:
        step.graph.erase_node(step)
