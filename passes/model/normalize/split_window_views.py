"""Write a view of several sequences as windows in two steps.

    y = x.view(8, 6, C)                     # x: [2, 24, C]
      ->
    unflatten = unflatten(x, 1, (4, 6))     # [2, 4, 6, C]
    y = flatten(unflatten, 0, 1)            # [8, 6, C]

In one step nobody sees that the rows of the result are windows of the sequences; in two
they stay with the ranks that have the tokens. What joins windows is written so, too.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cpcompile.geometry.lengths import is_symbol

from ...graph.calls import canonical_call
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_nodes, fake_value, insert_call

_LEAST_NDIM = 3  # of windows of vectors; fewer dimensions are flattened tokens


@graph_pass()
def split_window_views(graph: fx.Graph, ctx: object) -> int:
    """Split views that make or join windows; return how many there were."""
    count = 0
    for node in all_nodes(graph):
        if node.op != "output" and canonical_call(node).name in ("view", "reshape"):
            count += _split(node)
    return count


def _split(node: fx.Node) -> bool:
    """Write one view in two steps; tell whether it was such a view."""
    source = canonical_call(node).arguments["input"]
    before, after = (list(fake_value(x).shape) for x in (source, node))
    if any(map(is_symbol, (*before, *after))) or before == after:
        return False
    if len(before) != len(after) or len(after) < _LEAST_NDIM or before[2:] != after[2:]:
        return False
    if 0 in before:
        return False
    if after[0] > before[0] and after[0] % before[0] == 0:  # makes windows
        cut, (dim, first) = (before[0], after[0] // before[0], after[1]), (1, 0)
    elif before[0] % after[0] == 0:  # joins them
        cut, (dim, first) = (after[0], before[0] // after[0], before[1]), (0, 1)
    else:
        return False
    if 1 in cut[1:]:
        return False
    value, parts = fake_value(node), cut[dim : dim + 2]
    with node.graph.inserting_before(node):
        inner = insert_call(
            node.graph,
            torch.unflatten,
            (source, dim, parts),
            like=node,
            value=fake_value(source).unflatten(dim, parts),
        )
        new = insert_call(
            node.graph, torch.flatten, (inner, first, first + 1), like=node, value=value
        )
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True
