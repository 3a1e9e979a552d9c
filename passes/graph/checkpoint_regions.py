"""Checkpoint regions, and the ways by which masks get into them."""

from __future__ import annotations

from collections import Counter

import torch.fx as fx

from .nodes import fake_value, sub_graph


class Regions:
    """The checkpoint regions of a graph and the calls that run them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._calls: dict[fx.Graph, fx.Node] = {}
        self._runs: Counter[fx.Graph] = Counter()
        self._brought: dict[tuple[fx.Graph, fx.Node], fx.Node] = {}
        self._enter(graph)

    def _enter(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            region = sub_graph(node)
            if region is not None:
                self._calls[region.graph] = node
                self._runs[region.graph] += 1
                self._enter(region.graph)

    def is_shared(self, graph: fx.Graph) -> bool:
        """Tell whether a graph is run by several calls, or is inside of one that is."""
        while graph is not self.graph:
            if self._runs[graph] > 1:
                return True
            graph = self._calls[graph].graph
        return False

    def anchor(self, node: fx.Node) -> fx.Node:
        """Return the node of the outermost graph in which `node` runs."""
        while node.graph is not self.graph:
            node = self._calls[node.graph]
        return node

    def bring_in(self, node: fx.Node, graph: fx.Graph) -> fx.Node:
        """Pass a node of the outermost graph to a region, and return the argument."""
        if graph is self.graph:
            return node
        key = (graph, node)
        if key not in self._brought:
            call = self._calls[graph]
            outside = self.bring_in(node, call.graph)
            last = graph.find_nodes(op="placeholder")[-1:]
            first = next(iter(graph.nodes))
            with (
                graph.inserting_after(last[0])
                if last
                else graph.inserting_before(first)
            ):
                inside = graph.placeholder(node.name)
            inside.meta["example_value"] = fake_value(node)
            call.args = (*call.args, outside)
            self._brought[key] = inside
            assert graph.owning_module is not None
            graph.owning_module.recompile()
        return self._brought[key]
