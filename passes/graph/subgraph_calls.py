"""Call a function that a graph has as a submodule, by torch's invoke_subgraph.

Inductor compiles such a function once, however often it is called.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx


def call_subgraph(
    function: fx.Node, operands: Sequence[fx.Node], meta: Mapping[str, Any]
) -> list[fx.Node]:
    """Insert a call at the graph's insertion point; return a node per result.

    function: the get_attr node of a submodule. The values of the submodule and of
    `operands` lie in `meta["val"]`. meta: what the new nodes inherit.
    """
    graph = function.graph
    module = getattr(graph.owning_module, str(function.target))
    node = graph.call_function(
        torch.ops.higher_order.invoke_subgraph,
        (function, f"cp_{function.target}", *operands),
    )
    values = [x.meta["val"] for x in module.graph.output_node().args[0]]
    node.meta.update(meta, val=tuple(values))
    parts = []
    for i, value in enumerate(values):
        item = graph.call_function(operator.getitem, (node, i))
        item.meta.update(meta, val=value)
        parts.append(item)
    return parts
