"""Take nodes out of a graph that only a mask needed, and that nobody reads any more."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from ...graph.calls import set_argument
from ...graph.context import MaskSource
from ...graph.effects import written_by
from ...graph.nodes import all_graphs, sub_graph
from .analysis.mask_program import VMAP_EDGES, VMAP_MARKS, memory_of, resolve, writes_of


def drop_mask(node: fx.Node, is_causal: bool) -> None:
    """Remove the mask of an attention call, and set is_causal in its place."""
    set_argument(node, "attn_mask", None)
    set_argument(node, "is_causal", is_causal)


def erase_masks(graph: fx.Graph, sources: Iterable[MaskSource]) -> int:
    """Erase nodes that computed these masks and have no other reader; returns how many.

    A write in place goes if nothing that is left shares the memory it writes to. Marks
    of vmap have no readers; they go if nothing is left between them.
    """
    sources = tuple(sources)
    mine = {node for source in sources for node in source.nodes}
    mine |= _unread_edges(graph)
    outer = {p: a for source in sources for p, a in source.outer.items()}
    gone, before = 0, -1
    while gone != before:
        before = gone
        _drop_arguments(graph, mine, outer)
        unread = _unread(graph, mine)
        for node in reversed(unread):
            mine.remove(node)
            node.graph.erase_node(node)
        gone += len(unread)
    return gone


def _unread_edges(graph: fx.Graph) -> set[fx.Node]:
    """Find the indices that a vmap hands to a function that does not ask for them."""
    everything = [node for subgraph in all_graphs(graph) for node in subgraph.nodes]
    edges = {n for n in everything if n.target in VMAP_EDGES and not n.users}
    edge_inputs = {n for edge in edges for n in edge.all_input_nodes}
    return edges | {n for n in edge_inputs if n.target is torch.arange}


def _unread(graph: fx.Graph, mine: set[fx.Node]) -> list[fx.Node]:
    """Return the nodes of `mine` that nothing else needs, in order."""
    everything = [node for subgraph in all_graphs(graph) for node in subgraph.nodes]
    writes = set(writes_of(mine))
    needed_nodes = {node for node in everything if node not in mine}
    memory = {memory_of(node) for node in needed_nodes}
    growing = True
    while growing:
        growing = False
        for node in mine - needed_nodes:
            needed = any(user in needed_nodes for user in node.users) or (
                node in writes and any(memory_of(x) in memory for x in written_by(node))
            )
            if needed:
                needed_nodes.add(node)
                memory.add(memory_of(node))
                growing = True
    if any(node.target in VMAP_EDGES for node in needed_nodes):
        needed_nodes |= {node for node in mine if node.target in VMAP_MARKS}
    return [node for node in everything if node in mine and node not in needed_nodes]


def _drop_arguments(
    graph: fx.Graph, mine: set[fx.Node], outer: dict[fx.Node, fx.Node]
) -> None:
    """Remove the arguments of regions that do not read a mask any more."""
    for node in graph.nodes:
        region = sub_graph(node)
        if region is None or sum(sub_graph(n) is region for n in graph.nodes) > 1:
            continue
        _drop_arguments(region.graph, mine, outer)
        inner = region.graph.find_nodes(op="placeholder")
        unread = {p for p in inner if not p.users and resolve(p, outer) in mine}
        if unread:
            pairs = zip(inner, node.args[1:], strict=True)
            node.args = (node.args[0], *(a for p, a in pairs if p not in unread))
            for placeholder in unread:
                region.graph.erase_node(placeholder)
            region.recompile()
