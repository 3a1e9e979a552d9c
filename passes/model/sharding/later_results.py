"""Compute a wide result after the program, from what the program returns in its place.

    program: hidden -> linear -> loss         returns linear, loss
      ->
    program: hidden -> linear -> loss         returns hidden, loss
    later:   hidden -> linear                 returns linear

A loss runs in tiles if nothing else needs the logits. A model that returns them beside
the loss needs them as a whole, but not in the program: autograd would give it their
gradient too, as large, zeros where nobody uses them. So they are made from the hidden
states once more, outside, by the same calls on DTensors. Their gradient exists if
somebody uses it, and joins that of the loss at the hidden states and the weight.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.fx as fx

from ...graph.context import PARAMETERS, Context
from ...graph.effects import is_in_place

_MOST_CALLS = 20  # that make a weight of parameters


def is_read(result: fx.Node) -> bool:
    """Tell whether another result is made of one, as a loss."""
    waiting, seen = [result], set[fx.Node]()
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output":
                continue
            if any(reader.op == "output" for reader in user.users):
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def changes_autocast(graph: fx.Graph) -> bool:
    """Tell whether calls may run under another autocast than around the program."""
    return any(x.target is torch.amp.autocast_mode._enter_autocast for x in graph.nodes)


class LaterProgram:
    """Copies of calls of the graph, which take the source and inputs of the graph."""

    def __init__(self, ctx: Context, source: fx.Node) -> None:
        self._places = {node: i for i, node in enumerate(ctx.inputs)}
        self._kinds = {node: x.kind for node, x in ctx.inputs.items()}
        self.graph = fx.Graph()
        self._copies = {source: self.graph.placeholder("source")}
        self._inputs: list[int] = []

    @property
    def inputs(self) -> tuple[int, ...]:
        """Which inputs of the graph the program takes after the source."""
        return tuple(self._inputs)

    def copies(self, calls: Collection[fx.Node]) -> bool:
        """Copy calls, and what else they read; False if that is no mere parameter."""
        read = [x for call in calls for x in call.all_input_nodes if x not in calls]
        weights: dict[fx.Node, None] = {}
        if not all(x in self._copies or self._follows(x, weights) for x in read):
            return False
        for node in weights:
            if node.op == "placeholder":
                self._copies[node] = self.entered(self.graph.placeholder(node.name))
                self._inputs.append(self._places[node])
        for node in (*weights, *calls):
            if node.op != "placeholder":
                copy = self.graph.node_copy(node, self._copies.__getitem__)
                copy.meta = {}
                self._copies[node] = copy
        return True

    def entered(self, weight: fx.Node) -> fx.Node:
        """Return what calls read of a parameter."""
        return weight

    def _follows(self, node: fx.Node, found: dict[fx.Node, None]) -> bool:
        """Add a parameter, or calls that make a weight of some, in order."""
        if node in found:
            return True
        if node.op == "placeholder":
            found[node] = None
            return self._kinds[node] in PARAMETERS
        is_ours = str(getattr(node.target, "__module__", "")).startswith("cpcompile")
        if (
            node.op not in ("call_function", "call_method")
            or is_ours
            or is_in_place(node)
            or not node.all_input_nodes
            or len(found) > _MOST_CALLS
        ):
            return False
        if not all(self._follows(x, found) for x in node.all_input_nodes):
            return False
        found[node] = None
        return True

    def finished(self, result: fx.Node) -> fx.Graph:
        self.graph.output(self._copies[result])
        self.graph.lint()
        return self.graph
