"""Write what exchange_mixers has marked as calls that AOTAutograd traces.

    constraint(x, EXCHANGED, 1, 2)    ->  cp.split_along(x, 1, 2)
    mixed_in_parts([q, k, v])         ->  cp.mixer_in_parts([q, k, v])

On the joint graph of the whole sequence `localise` has rules for these.
"""

from __future__ import annotations

import torch.fx as fx

from cpcompile.ops.shared_mixers import ALL, IN_PARTS, SPLIT_ALONG

from ...graph.graph_pass import graph_pass
from ...graph.mixer_calls import mixed_in_parts
from ...graph.nodes import all_nodes
from ...graph.sequence_tokens import Wanted, wanted_of


@graph_pass()
def write_exchanges(graph: fx.Graph, _: object) -> int:
    """Write what is marked as calls that AOTAutograd traces; return how many."""
    count = 0
    for node in all_nodes(graph):
        if node.target is mixed_in_parts:
            node.target = IN_PARTS
        elif wanted_of(node) is Wanted.EXCHANGED:
            x, _, source, target = node.args
            node.target = SPLIT_ALONG
            node.args = (x, source, ALL if target is None else target)
        else:
            continue
        count += 1
    return count
