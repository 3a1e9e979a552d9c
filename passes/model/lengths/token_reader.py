"""Follow the tokens of a padded sequence from the inputs of a graph to its results."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import expected

from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, function_of
from ...graph.context import AttentionCall, Context
from ...graph.effects import is_in_place
from ...graph.nodes import (
    all_graphs,
    fake_value,
    sub_graph,
    where,
)
from ...graph.sequence_tokens import Padding, TokenAxis, Tokens
from ..moe.token_program import row_program_of
from .attention_rule import hide_keys
from .creation_rules import FILLED, beginning
from .cross_token_rules import RULES, by_rows
from .length_arithmetic import ARITHMETIC, with_real_numbers
from .masking import PaddingMasker
from .padded_tokens import Found, Unproved
from .padded_writes import written
from .sizes import COMPUTES, Sizes, check_numbers, is_number
from .traced_calls import Traces

# Calls that look up by positions, which may reach beyond the end of a table.
_LOOK_UPS = {"embedding", "index_select", "gather", "getitem", "index"}
_RESHAPED = {
    "view", "reshape", "flatten", "contiguous", "unsqueeze", "squeeze", "transpose",
    "permute", "to", "clone",
}  # fmt: skip


class Reader:
    """Finds the tokens of every value that is read, and has calls fixed on the way.

    found: what is known of each value so far.
    """

    def __init__(self, graph: fx.Graph, ctx: Context, padding: Padding) -> None:
        self.graph, self.ctx, self.length = graph, ctx, padding.symbol
        self.sizes = Sizes(padding.symbol)
        self.masker = PaddingMasker(graph, padding)
        self.traces = Traces()
        self.found: dict[fx.Node, Found] = {}
        self.calls: dict[fx.Node, AttentionCall] = {
            c.node: c for c in ctx.findings.calls
        }
        # Where something is written, numbers do not stay what they were.
        graphs = all_graphs(graph)
        self.writes = [n for each in graphs for n in each.nodes if _writes(n)]
        self.trusts_fills = not self.writes

    def read(self) -> list[Tokens | int | None]:
        """Return the tokens of every result of the graph; n for the number S + n.

        Raises: Unproved.
        """
        for each in all_graphs(self.graph):
            if self.masker.regions.is_shared(each):
                raise Unproved("a checkpoint region runs several times")
        found = self._read(self.graph)
        (results,) = self.graph.output_node().args
        assert isinstance(results, tuple | list)
        for i, x in enumerate(results):
            if is_number(fake_value(x)):
                found[i] = self.sizes.extra_of(fake_value(x))
                if found[i] is None:
                    raise Unproved("a result is computed from the number of tokens")
        return found

    def _read(self, graph: fx.Graph) -> list[Any]:
        """Visit the nodes that compute the results and the writes of a graph.

        Returns what is known of each result.
        """
        needed = self._needed(graph)
        for node in list(graph.nodes):
            if node not in needed or node.op == "output":
                continue
            if node.op == "placeholder":
                if graph is self.graph:
                    self.found[node] = self.sizes.of_input(fake_value(node))
                continue
            try:
                found = self._visit(node)  # which may erase it
            except Unproved as problem:
                raise Unproved(f"{node.name} at {where(node)}: {problem}") from None
            if not self.trusts_fills and isinstance(found, Tokens):
                found = found.filled(None)
            self.found[node] = found
        (results,) = graph.output_node().args
        flat = results if isinstance(results, tuple | list) else (results,)
        return [self._given(x) for x in flat]

    def _needed(self, graph: fx.Graph) -> set[fx.Node]:
        """Return the nodes that compute the results, or write; not those of masks."""
        stack = [n for n in graph.nodes if n.op == "output" or _writes(n)]
        found: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in found:
                continue
            found.add(node)
            region = sub_graph(node)
            if region is not None:
                inside = self._needed(region.graph)
                stack += [x for p, x in _arguments(region, node) if p in inside]
                continue
            call = self.calls.get(node)
            mask = (
                None
                if call is None or call not in self.ctx.findings.masks
                else call.mask
            )
            stack += [x for x in node.all_input_nodes if x is not mask]
        return found

    def _given(self, x: Any) -> Any:
        return self.found[x] if isinstance(x, fx.Node) else None

    def _visit(self, node: fx.Node) -> Found:
        region = sub_graph(node)
        if region is not None:
            for placeholder, argument in _arguments(region, node):
                if argument in self.found:
                    self.found[placeholder] = self.found[argument]
            return tuple(self._read(region.graph))
        value = fake_value(node)
        operands = {x: self.found.get(x) for x in node.all_input_nodes}
        if _writes(node) and any(operands.values()):
            check_numbers(node)
            given = {x: t for x, t in operands.items() if isinstance(t, Tokens)}
            return written(self, node, given)
        if not any(isinstance(x, Tensor) for x in pytree.tree_leaves(value)):
            if isinstance(value, torch.SymFloat | torch.SymBool):
                raise Unproved(COMPUTES)
            return None  # a size, or a state such as autocast
        call = canonical_call(node)
        several = [x for x, found in operands.items() if isinstance(found, tuple)]
        if several:
            found = operands[several[0]]
            assert isinstance(found, tuple)
            if call.name != "getitem" or not isinstance(node.args[1], int):
                raise Unproved("it takes several values as one")
            return found[node.args[1]]
        if call.name in ARITHMETIC:
            operands = with_real_numbers(node, operands, self.sizes, self.masker)
        check_numbers(node)
        given = {x: t for x, t in operands.items() if isinstance(t, Tokens)}
        if not given or call.name in FILLED:
            result: Found = beginning(node, call, self.sizes)
        elif is_attention(node):
            result = self._attended(node, given)
        elif row_program_of(node) is not None:
            result = by_rows(self, node, given)
        elif call.name in RULES:
            result = RULES[call.name](self, node, call.arguments, given)
        else:
            result = self.traced(node, given)
        self.sizes.check(value, result)
        return result

    def _attended(self, node: fx.Node, given: dict[fx.Node, Tokens]) -> Tokens:
        call = self.calls.get(node)
        if call is None or call.obstacle or call.left_alone:
            raise Unproved("this attention is not shared out")
        keys = [call.k, call.v]
        if given.keys().isdisjoint(keys):
            keys = []  # of another sequence, which has no padding
        for x in (call.q, *keys):
            tokens = Tokens(TokenAxis(fake_value(x).dim() - 2))
            if x not in given or given[x].filled(None) != tokens:
                raise Unproved("not all of queries, keys and values are of the tokens")
        if given.keys() - {call.q, call.k, call.v}:
            raise Unproved("it reads tokens besides queries, keys and values")
        if keys:
            hide_keys(self.ctx, call, self.masker)
        return Tokens(TokenAxis(fake_value(node).dim() - 2))

    def traced(self, node: fx.Node, given: dict[fx.Node, Tokens]) -> Found:
        """Find the tokens of a result by the aten calls of a call, which mix no tokens.

        Raises: Unproved.
        """
        extras = {t.extra for t in given.values()}
        if len(extras) > 1:
            raise Unproved("tokens of different lengths meet")
        (extra,) = extras
        if canonical_call(node).name in _LOOK_UPS:
            given = self._with_first_rows(node, given)
        axes = {x: t.axis for x, t in given.items()}
        tokens = expected(self.length) + extra
        found, views = self.traces.axes_of(node, axes, tokens)
        fills = {t.fill for t in given.values()}
        fill = fills.pop() if views and len(fills) == 1 else None
        each = [None if x is None else Tokens(x, extra, fill) for x in found]
        return each[0] if isinstance(fake_value(node), Tensor) else tuple(each)

    def _with_first_rows(
        self, node: fx.Node, given: dict[fx.Node, Tokens]
    ) -> dict[fx.Node, Tokens]:
        """Set indices in the padding to 0, which is never beyond the end of a table.

        Positions in the padding may be. An index that is an input repeats the last
        token, which is in the table.
        """
        changed: dict[fx.Node, Tokens] = {}
        for index, tokens in given.items():
            value = fake_value(index)
            if index.op == "placeholder" or value.is_floating_point():
                changed[index] = tokens
                continue
            hidden = self.filled(node, index, 0)
            node.replace_input_with(index, hidden)
            changed[hidden] = tokens.filled(0)
        return changed

    def filled(self, at: fx.Node, node: fx.Node, number: Any) -> fx.Node:
        """Return `node` with a number in the padding, for a reader `at`.

        The number is put in before tokens and batch are made one dimension, where it
        can be.
        """
        tokens = self.found[node]
        assert isinstance(tokens, Tokens)
        if tokens.fill == number:
            return node
        views: list[fx.Node] = []
        start: fx.Node | None = node
        while start is not None and not self._is_whole(start):
            views.append(start)
            start = self._viewed(start)
        if start is None:
            views, start = [], node
        before = self.found[start]
        assert isinstance(before, Tokens)
        hidden = self.masker.filled(at, start, before, number)
        self.found[hidden] = before.filled(number)
        for view in reversed(views):
            hidden = self._again(at, view, start, hidden, number)
            start = view
        return hidden

    def _again(
        self, at: fx.Node, view: fx.Node, old: fx.Node, new: fx.Node, number: Any
    ) -> fx.Node:
        """Repeat a view of `old` on `new`."""
        given = (view.args, view.kwargs)
        args, kwargs = fx.map_arg(given, lambda x: new if x is old else x)
        again = self.masker.call(at, function_of(view), *args, **kwargs)
        tokens = self.found[view]
        assert isinstance(tokens, Tokens)
        self.found[again] = tokens.filled(number)
        return again

    def _is_whole(self, node: fx.Node) -> bool:
        found = self.found[node]
        return isinstance(found, Tokens) and found.is_whole

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """Return the node that a view of tokens is a view of; else None."""
        if canonical_call(node).name not in _RESHAPED:
            return None
        sources = [x for x in node.all_input_nodes if self.found.get(x) is not None]
        return sources[0] if len(sources) == 1 else None

    def replaced(self, node: fx.Node, new: fx.Node) -> None:
        """Let all readers read another value, which has no tokens."""
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)
        self.found[new] = None


def _arguments(region: fx.GraphModule, call: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the inputs of a checkpoint region, each with the node that it is given."""
    inner = region.graph.find_nodes(op="placeholder")
    pairs = zip(inner, call.args[1:], strict=True)
    return [(p, x) for p, x in pairs if isinstance(x, fx.Node)]


def _writes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and is_in_place(node)
