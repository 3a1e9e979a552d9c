"""Puts the nodes of a graph in an order that runs."""

from __future__ import annotations

import torch.fx as fx


def sort_calls(graph: fx.Graph) -> None:
    """Put every call behind its operands, and else leave the order."""
    waiting: dict[fx.Node, list[fx.Node]] = {}
    done: set[fx.Node] = set()
    last: fx.Node | None = None
    for start in list(graph.nodes):
        ready = [start]
        while ready:
            node = ready.pop()
            missing = next((x for x in node.all_input_nodes if x not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(node)
                continue
            if last is not None:
                last.append(node)
            last = node
            done.add(node)
            ready += reversed(waiting.pop(node, []))
