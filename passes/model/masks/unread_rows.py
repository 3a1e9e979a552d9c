"""Let every rank compute its own rows of a mask that cannot be read.

    bias = new_full(k, (1, 1, S, T + 1), -inf)
    bias.scatter_(-1, chosen, 0)                  chosen: [1, 1, S, 16], of scores
    late = ge(arange(T), limits)                  limits: [1, 1, S, 1], of positions
      ->  mask_rows: bias is cut along 2, an alias of limits along 2

What is computed of sharded values has rows by itself, if what it is joined with has
them: new tensors, and values by position. Queries are followed back from the mask to
these, so that no rank makes all pairs of them. Where that ends without an answer,
DTensor decides, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx
from torch import Tensor

from ...flow.flow import Flows
from ...flow.token_sources import token_sources
from ...graph.calls import NEW_TENSORS, spelled
from ...graph.context import AttentionCall
from ...graph.nodes import expected_shape, fake_value, insert_call, sub_graph
from ...graph.sequence_tokens import SequenceDim, TokenDim
from .analysis.mask_program import resolve


class UnreadRows:
    """The rows of the masks of one graph; layers share masks and parts of them.

    outer: what gives placeholders of checkpoint regions their values.
    """

    def __init__(self, flows: Flows, outer: dict[fx.Node, fx.Node]) -> None:
        self.flows, self.outer = flows, outer
        self._seen: set[tuple[fx.Node, int]] = set()

    def find(self, call: AttentionCall) -> dict[fx.Node, int]:
        """Return the values to be cut for the mask of a call, with their dimension."""
        assert call.mask is not None
        rows: dict[fx.Node, int] = {}
        waiting = [(call.mask, fake_value(call.mask).ndim - 2)]
        while waiting:
            node, dim = waiting.pop()
            if (node, dim) in self._seen:
                continue
            self._seen.add((node, dim))
            if spelled(node) in NEW_TENSORS:
                rows[node] = dim
                continue
            for source, at in self._sources(node, dim):
                if _has_pairs(source, at):
                    waiting.append((source, at))
                elif _is_vector(source, at) and node.graph is source.graph:
                    rows[_alias(node, source)] = at
        return rows

    def _sources(self, node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int]]:
        """Yield the operands that have the rows of a value, each with its dimension."""
        outer = resolve(node, self.outer)
        if outer is not node:
            yield outer, dim
            return
        value = fake_value(node)
        if node.op not in ("call_function", "call_method") or not isinstance(
            value, Tensor
        ):
            return
        if sub_graph(node) is not None:
            return
        wanted = SequenceDim(TokenDim(dim), expected_shape(value)[dim])
        for source, at in token_sources(self.flows, node, wanted):
            if at.outer == 1 and fake_value(source).shape[at.dim] == value.shape[dim]:
                yield source, at.dim


def _has_pairs(node: fx.Node, rows: int) -> bool:
    """Tell whether a value has several numbers for each row, which are its last."""
    shape = expected_shape(fake_value(node))
    return rows == len(shape) - 2 and shape[-1] > 1


def _is_vector(node: fx.Node, rows: int) -> bool:
    """Tell whether a value has one number for each row."""
    shape = expected_shape(fake_value(node))
    return all(n == 1 for n in shape[rows + 1 :])


def _alias(user: fx.Node, source: fx.Node) -> fx.Node:
    """Return a name of a value that only this reader has, so that it alone is cut."""
    with user.graph.inserting_before(user):
        alias = insert_call(
            user.graph,
            torch.ops.aten.alias.default,
            (source,),
            like=user,
            value=fake_value(source),
        )
    user.replace_input_with(source, alias)
    return alias
