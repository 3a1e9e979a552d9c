"""Name calls, so that they are known when their graph is compiled again.

What is written into a graph for a call has the name of the call.
"""

from __future__ import annotations

import torch.fx as fx

ORIGIN = "cp_origin"  # in node.meta; copied by graph.insert_call


def name_origin(node: fx.Node, region: str) -> str:
    """Give a node its name; `region` tells equal names apart."""
    name: str = node.meta.setdefault(ORIGIN, f"{region}{node.name}")
    return name


def origin(node: fx.Node) -> str | None:
    """Return the name of the call for which a node was written; None if it has none."""
    return node.meta.get(ORIGIN)
