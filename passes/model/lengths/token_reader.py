"""Follow the tokens of a padded sequence from the inputs of a graph to its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.torch_private import pytree

from ...flow.trial import STATE_CALLS
from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, function_of
from ...graph.context import AttentionCall
from ...graph.loss_calls import ELEMENTWISE, OF_CLASSES
from ...graph.nodes import all_graphs, fake_value, sub_graph, where
from ...graph.sequence_tokens import TokenAxis, Tokens
from ..moe.token_program import row_program_of
from .attention_rule import hide_keys
from .padded_graph import PaddedGraph, writes
from .positions import (
    FILLED,
    beginning,
    convolved,
    getitem,
    joined,
    one_hot,
    padded,
    select,
)
from .reductions import (
    NEUTRAL,
    PRODUCTS,
    added_up,
    class_loss,
    elementwise_loss,
    reduced,
)
from .sizes import Found, Unproved, is_number
from .token_writes import written

TokenRule = Callable[[PaddedGraph, fx.Node, dict[str, Any]], Found]

# Calls in which tokens meet, or whose arguments say where they go.
_RULES: dict[str, TokenRule] = {
    **dict.fromkeys(NEUTRAL, reduced),
    **dict.fromkeys(PRODUCTS, added_up),
    **dict.fromkeys(OF_CLASSES, class_loss),
    **dict.fromkeys(ELEMENTWISE, elementwise_loss),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolved),
    "one_hot": one_hot,
    "getitem": getitem,
    "select": select,
    "pad": padded,
    "cat": joined,
}
# Calls that look up by positions, which may reach beyond the end of a table; and which
# argument has them.
_LOOK_UPS = {
    "embedding": "input", "index_select": "index", "gather": "index",
    "getitem": "index", "index": "indices",
}  # fmt: skip
# Calls for which a number is the same as a tensor without dimensions.
_ARITHMETIC = {"add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne"}
# Arguments that may be a number of tokens: they say how far values reach.
_SIZES = {"size", "shape", "sizes", "end", "length"}
_COMPUTES = "it computes with the number of tokens"


class Reader:
    """Finds the tokens of every value that is read, and has calls fixed on the way."""

    def __init__(self, graph: PaddedGraph) -> None:
        self.graph, self.found = graph, graph.found
        self.findings = graph.ctx.findings
        self.calls: dict[fx.Node, AttentionCall] = {
            call.node: call for call in self.findings.calls
        }
        self._states: list[Any] = []

    def read(self) -> list[Tokens | int | None]:
        """Return the tokens of every result of the graph; n for the number S + n.

        Raises: Unproved.
        """
        graph = self.graph.graph
        for subgraph in all_graphs(graph):
            if self.graph.regions.is_shared(subgraph):
                raise Unproved("a checkpoint region runs several times")
        try:
            tokens = self._read(graph)
        finally:
            for state in reversed(self._states):
                state.__exit__(None, None, None)
        (results,) = graph.output_node().args
        assert isinstance(results, tuple | list)
        for i, x in enumerate(results):
            if is_number(fake_value(x)):
                tokens[i] = self.graph.sizes.extra_of(fake_value(x))
                if tokens[i] is None:
                    raise Unproved("a result is computed from the number of tokens")
        return tokens

    def _read(self, graph: fx.Graph) -> list[Any]:
        """Visit the nodes that compute the results and the writes of a graph.

        Returns what is known of each result.
        """
        needed = self._needed(graph)
        for node in list(graph.nodes):
            if node.op == "placeholder":
                if graph is self.graph.graph:
                    self.found[node] = self.graph.sizes.of_input(fake_value(node))
            elif node.target in STATE_CALLS:
                self._change_state(node)
            elif node in needed and node.op != "output":
                try:
                    tokens = self._visit(node)  # which may erase it
                except Unproved as problem:
                    raise Unproved(f"{node.name} at {where(node)}: {problem}") from None
                self.found[node] = tokens
        (results,) = graph.output_node().args
        flat = results if isinstance(results, tuple | list) else (results,)
        return [self.found[x] if isinstance(x, fx.Node) else None for x in flat]

    def _change_state(self, node: fx.Node) -> None:
        """Enter or leave autocast, under which the calls between are asked for."""
        if any(node.all_input_nodes):
            self._states.pop().__exit__(None, None, None)
        else:
            self._states.append(function_of(node)(*node.args))

    def _needed(self, graph: fx.Graph) -> set[fx.Node]:
        """Return the nodes that compute the results, or write; not those of masks."""
        stack = [n for n in graph.nodes if n.op == "output" or writes(n)]
        needed: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in needed:
                continue
            needed.add(node)
            region = sub_graph(node)
            if region is not None:
                inside = self._needed(region.graph)
                stack += [x for p, x in _arguments(region, node) if p in inside]
                continue
            call = self.calls.get(node)
            is_read = call is not None and call in self.findings.masks
            mask = call.mask if call is not None and is_read else None
            stack += [x for x in node.all_input_nodes if x is not mask]
        return needed

    def _visit(self, node: fx.Node) -> Found:
        region = sub_graph(node)
        if region is not None:
            for placeholder, argument in _arguments(region, node):
                if argument in self.found:
                    self.found[placeholder] = self.found[argument]
            return tuple(self._read(region.graph))
        value = fake_value(node)
        if not writes(node) and not any(
            isinstance(x, Tensor) for x in pytree.tree_leaves(value)
        ):
            if isinstance(value, torch.SymFloat | torch.SymBool):
                raise Unproved(_COMPUTES)
            return None  # a size
        call = canonical_call(node)
        several = [
            x for x in node.all_input_nodes if isinstance(self.found.get(x), tuple)
        ]
        if several:
            parts = self.found[several[0]]
            assert isinstance(parts, tuple)
            if call.name != "getitem" or not isinstance(node.args[1], int):
                raise Unproved("it takes several values as one")
            return parts[node.args[1]]
        self._with_real_numbers(node)
        token_inputs = [x for x in node.all_input_nodes if self.graph.tokens(x)]
        result: Found
        if writes(node) and token_inputs:
            result = written(self.graph, node)
        elif not token_inputs or call.name in FILLED:
            result = beginning(self.graph, node)
        elif is_attention(node):
            result = self._attended(node, token_inputs)
        elif row_program_of(node) is not None:
            result = added_up(self.graph, node, {})
        else:
            self._look_up_first_rows(node)
            rule = _RULES.get(call.name)
            if rule is None:
                result = self.graph.node_by_token(node)
            else:
                result = rule(self.graph, node, canonical_call(node).arguments)
        if isinstance(value, Tensor | tuple | list):
            self.graph.sizes.check(value, result)
        return result

    def _with_real_numbers(self, node: fx.Node) -> None:
        """Give arithmetic the real number of tokens for P: x.sum(1) / x.shape[1].

        Raises: Unproved, if a number of tokens is more than a size to another call, or
        if a tensor gives another dtype than a number does.
        """
        numbers = [x for x in node.all_input_nodes if is_number(fake_value(x))]
        call = canonical_call(node)
        if not numbers or call.name in ("getitem", "setitem"):  # indices are read
            return
        value_nodes: list[fx.Node] = []
        arguments = [x for name, x in call.arguments.items() if name not in _SIZES]
        fx.map_arg(arguments, value_nodes.append)
        changed = False
        for number in numbers:
            extra = self.graph.sizes.extra_of(fake_value(number))
            factors = [call.arguments.get(name) for name in ("input", "other")]
            if call.name in _ARITHMETIC and extra is not None and number in factors:
                real = self.graph.vector(node.graph, "real", extra)
                node.replace_input_with(number, real)
                self.graph.fixes, changed = self.graph.fixes + 1, True
            elif not call.name or number in value_nodes:
                raise Unproved(_COMPUTES)
        if changed:
            result = self.graph.run(function_of(node), node.args, node.kwargs)
            if result.dtype != fake_value(node).dtype:
                raise Unproved(_COMPUTES)

    def _attended(self, node: fx.Node, token_inputs: list[fx.Node]) -> Tokens:
        call = self.calls.get(node)
        if call is None or call.unsupported or call.already_local:
            raise Unproved("this attention is not shared out")
        keys = [call.k, call.v]
        if not set(token_inputs) & set(keys):
            keys = []  # of another sequence, which has no padding
        for x in (call.q, *keys):
            if self.graph.tokens(x) != Tokens(TokenAxis(fake_value(x).dim() - 2)):
                raise Unproved("not all of queries, keys and values are of the tokens")
        if set(token_inputs) - {call.q, call.k, call.v}:
            raise Unproved("it reads tokens besides queries, keys and values")
        if keys:
            hide_keys(self.graph, call)
        return Tokens(TokenAxis(fake_value(node).dim() - 2))

    def _look_up_first_rows(self, node: fx.Node) -> None:
        """Set indices in the padding to 0, which is never beyond the end of a table.

        Positions in the padding may be. An index that is an input repeats the last
        token, which is in the table.
        """
        call, indices = canonical_call(node), list[fx.Node]()
        fx.map_arg(call.arguments.get(_LOOK_UPS.get(call.name, "")), indices.append)
        for index in indices:
            if index.op != "placeholder" and self.graph.tokens(index):
                self.graph.hide(node, index, 0)


def _arguments(region: fx.GraphModule, call: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the inputs of a checkpoint region, each with the node that it is given."""
    inner = region.graph.find_nodes(op="placeholder")
    pairs = zip(inner, call.args[1:], strict=True)
    return [(p, x) for p, x in pairs if isinstance(x, fx.Node)]
