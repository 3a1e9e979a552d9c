"""Write the program of a rank: the program of all tokens, on the rank's own tokens.

See Note [Chunks of tokens]: the rows of the rank take the place of the first rows of
the sequence, and chunks after them are empty. What nothing reads is not written.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from .chunk_values import Piece, Value

_META = ("stack_trace", "nn_module_stack")


class LocalProgram:
    """A rank's graph, which grows with every value that is asked for.

    Args:
        source: the program of all tokens.
        values: the values of its nodes.
        rows: how many tokens the rank has.
        group: name of the process group that shares the tokens.
        cut: arguments that every rank has; the rank's own rows of these are arguments
            too, after all others.
    """

    def __init__(
        self,
        source: fx.Graph,
        values: Mapping[fx.Node, Any],
        rows: int,
        group: str,
        cut: Sequence[fx.Node] = (),
    ) -> None:
        self._values, self._rows, self._group = values, rows, group
        self._graph = fx.Graph()
        self._written: dict[int, fx.Node] = {}
        self._inputs = {
            x: self._graph.placeholder(x.name)
            for x in source.find_nodes(op="placeholder")
        }
        self._own = {x: self._graph.placeholder(f"{x.name}_own") for x in cut}

    def count(self, start: int, stop: int) -> int:
        """Return how many of rows `start` to `stop` of the sequence the rank has."""
        return min(stop, self._rows) - min(start, self._rows)

    def has_rows(self, pieces: Sequence[Piece]) -> bool:
        """Tell whether the rank has any rows of these pieces."""
        return any(self.count(piece.start, piece.stop) for piece in pieces)

    def input(self, node: fx.Node) -> fx.Node:
        return self._inputs[node]

    def own_rows(self, node: fx.Node) -> fx.Node:
        """Return the rank's rows of an argument that every rank has."""
        return self._own[node]

    def of(self, value: Value) -> fx.Node:
        """Return the node of a value; write it first if it is not there."""
        if id(value) not in self._written:
            self._written[id(value)] = value.lower(self)
        return self._written[id(value)]

    def copy(
        self,
        node: fx.Node,
        operands: Mapping[fx.Node, fx.Node] | None = None,
        args: Any = None,
    ) -> fx.Node:
        """Write a call as it is in the program of all tokens.

        operands: nodes to read in place of some of its operands.
        args: arguments to take in place of its own.
        """
        if node.op == "placeholder":
            return self._inputs[node]
        replaced = operands or {}

        def operand(x: fx.Node) -> fx.Node:
            return replaced[x] if x in replaced else self.of(self._values[x])

        new_args, kwargs = fx.node.map_arg(
            (node.args if args is None else args, node.kwargs), operand
        )
        copy = self._graph.call_function(node.target, new_args, kwargs)  # type: ignore[arg-type]  # of aten
        copy.meta = {key: node.meta[key] for key in _META if key in node.meta}
        return copy

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """Write a call that the program of all tokens does not have."""
        return self._graph.call_function(target, args, kwargs or {})

    def item(self, results: fx.Node, number: int) -> fx.Node:
        return self._graph.call_function(operator.getitem, (results, number))

    def summed(self, part: fx.Node) -> fx.Node:
        """Write the sum of `part` over all ranks."""
        functional = torch.ops._c10d_functional
        sent = self.call(functional.all_reduce.default, (part, "sum", self._group))
        return self.call(functional.wait_tensor.default, (sent,))

    def finish(self, results: Sequence[Value | None]) -> fx.GraphModule:
        """Return the program whose results are these values."""
        self._graph.output(tuple(x if x is None else self.of(x) for x in results))
        return fx.GraphModule(torch.nn.Module(), self._graph)
