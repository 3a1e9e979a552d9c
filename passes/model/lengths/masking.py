"""Insert the calls that hide the padding where tokens meet.

    cross_entropy(logits, labels)  ->  cross_entropy(logits, where(valid, labels, -100))
    sum(x, 1)                      ->  sum(where(valid, x, 0), 1)
    mean(x, 1)                     ->  div(sum(where(valid, x, 0), 1), real)
    x[:, -1]                       ->  sum(where(position == real - 1, x, 0), 1)
    x[:, -5:]                      ->  index_select(x, 1, arange(-5, 0) + real)

valid is arange(P) < real, and real the number of tokens without the padding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...graph.calls import canonical_call
from ...graph.checkpoint_regions import Regions
from ...graph.nodes import fake_mode_of, fake_value, insert_call
from ...graph.sequence_tokens import Padding, Tokens
from .padded_tokens import Unproved

_LOW = (torch.bfloat16, torch.float16)


class PaddingMasker:
    """Inserts calls that hide the padding into a graph and its checkpoint regions."""

    def __init__(self, graph: fx.Graph, padding: Padding) -> None:
        self.padding, self.regions = padding, Regions(graph)
        self.fake_mode = fake_mode_of(graph)
        self.fixes = 0
        self._vectors: dict[tuple[fx.Graph, str, int], fx.Node] = {}

    def call(
        self, before: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        """Insert a call in front of `before`, on whose behalf it is made."""
        given, named = fx.map_arg((args, kwargs), fake_value)
        with self.fake_mode:
            value = target(*given, **named)
        with before.graph.inserting_before(before):
            return insert_call(
                before.graph, target, args, like=before, value=value, kwargs=kwargs
            )

    def _at_start(self, graph: fx.Graph, kind: str, extra: int) -> fx.Node:
        """Insert a value of the lengths after the inputs of a graph.

        kind: "real", the number of tokens without the padding; "positions", all of them
        with the padding; "valid", a bool for each.
        """
        key = (graph, kind, extra)
        if key in self._vectors:
            return self._vectors[key]
        length, real = (
            self.regions.bring_in(x, graph)
            for x in (self.padding.length, self.padding.real)
        )
        anchor = next(n for n in graph.nodes if n.op != "placeholder")
        if kind == "real":
            found = self.call(anchor, torch.add, real, extra) if extra else real
        elif kind == "positions":
            size = self.call(anchor, operator.add, length, extra) if extra else length
            device = fake_value(real).device
            found = self.call(anchor, torch.arange, size, device=device)
        else:
            positions = self._at_start(graph, "positions", extra)
            limit = self._at_start(graph, "real", extra)
            anchor = max(positions, limit).next
            found = self.call(anchor, torch.lt, positions, limit)
        self._vectors[key] = found
        return found

    def count(self, at: fx.Node, tokens: Tokens, others: int) -> fx.Node:
        """Return the number of tokens without the padding, times `others`."""
        real = self._at_start(at.graph, "real", tokens.extra)
        return real if others == 1 else self.call(at, torch.mul, real, others)

    def number(self, at: fx.Node, extra: int) -> fx.Node:
        """Return the real number of tokens plus `extra`, a tensor without dimensions.

        It makes no other dtype of a number that it is combined with.
        """
        self.fixes += 1
        return self._at_start(at.graph, "real", extra)

    def _along(
        self, at: fx.Node, vector: fx.Node, tokens: Tokens, dims: int
    ) -> fx.Node:
        """Reshape one number per token so that it broadcasts over all dimensions."""
        axis = tokens.axis
        if not tokens.is_whole:
            length = self.call(at, torch.Tensor.size, vector, 0)
            vector = self.call(at, torch.reshape, vector, [1, -1, 1])
            sizes = [axis.outer, length, axis.inner]
            vector = self.call(at, torch.Tensor.expand, vector, sizes)
        shape = [1] * axis.dim + [-1] + [1] * (dims - axis.dim - 1)
        if shape == [-1] and tokens.is_whole:
            return vector
        return self.call(at, torch.reshape, vector, shape)

    def filled(
        self, at: fx.Node, node: fx.Node, tokens: Tokens, number: Any
    ) -> fx.Node:
        """Return `node` with this number in the padding, for a reader `at`."""
        if tokens.fill == number:
            return node
        self.fixes += 1
        valid = self._at_start(at.graph, "valid", tokens.extra)
        mask = self._along(at, valid, tokens, fake_value(node).dim())
        return self.call(at, torch.where, mask, node, number)

    def positions(self, at: fx.Node) -> fx.Node:
        """Return the positions 0 to P - 1."""
        return self._at_start(at.graph, "positions", 0)

    def hidden_ids(self, at: fx.Node, ids: fx.Node) -> fx.Node:
        """Return segment ids [B or 1, P] with -1 in the padding, which no query has."""
        self.fixes += 1
        valid = self._at_start(at.graph, "valid", 0)
        return self.call(at, torch.where, valid, ids, -1)

    def last(self, at: fx.Node, node: fx.Node, tokens: Tokens, back: int) -> fx.Node:
        """Return the token `back` before the end of the first S + extra."""
        value = fake_value(node)
        if value.dtype == torch.bool or not tokens.is_whole:
            raise Unproved(f"{at.name} reads a token at the end")
        self.fixes += 1
        limit = self._at_start(at.graph, "real", tokens.extra)
        wanted = self.call(at, torch.sub, limit, back)
        positions = self._at_start(at.graph, "positions", tokens.extra)
        here = self.call(at, torch.eq, positions, wanted)
        mask = self._along(at, here, tokens, value.dim())
        alone = self.call(at, torch.where, mask, node, 0)
        return self.call(at, torch.sum, alone, [tokens.axis.dim], dtype=value.dtype)

    def tail(self, at: fx.Node, node: fx.Node, tokens: Tokens, count: int) -> fx.Node:
        """Return the last `count` of the first S + extra tokens, which are enough."""
        if not tokens.is_whole:
            raise Unproved(f"{at.name} reads tokens at the end")
        self.fixes += 1
        limit = self._at_start(at.graph, "real", tokens.extra)
        device = fake_value(node).device
        behind = self.call(at, torch.arange, -count, 0, device=device)
        index = self.call(at, torch.add, behind, limit)
        return self.call(at, torch.index_select, node, tokens.axis.dim, index)

    def reduced(self, at: fx.Node, node: fx.Node, tokens: Tokens) -> fx.Node:
        """Insert the sum or average that `at` is of `node`, without the padding."""
        call = canonical_call(at)
        given = call.arguments
        dims = reduced_dims(given.get("dim"), fake_value(node).dim())
        dtype = given.get("dtype")
        hidden = self.filled(at, node, tokens, 0)
        kept = {"keepdim": True} if given.get("keepdim") else {}
        if call.name == "sum":
            return self.call(at, torch.sum, hidden, dims, **kept, dtype=dtype)
        return self.averaged(at, hidden, tokens, dims, kept, dtype)

    def averaged(
        self,
        at: fx.Node,
        hidden: fx.Node,
        tokens: Tokens,
        dims: Sequence[int],
        kept: dict[str, Any],
        dtype: torch.dtype | None,
    ) -> fx.Node:
        """Insert the average over dimensions of what is 0 in the padding."""
        value: Tensor = fake_value(hidden)
        wanted = dtype or value.dtype
        exact = torch.float32 if wanted in _LOW else wanted
        axis = tokens.axis
        others = math.prod(int(value.shape[d]) for d in dims if d != axis.dim)
        count = self.count(at, tokens, others * axis.outer * axis.inner)
        total = self.call(at, torch.sum, hidden, dims, **kept, dtype=exact)
        mean = self.call(at, torch.div, total, count)
        return mean if exact is wanted else self.call(at, torch.Tensor.to, mean, wanted)


def reduced_dims(dim: Any, dims: int) -> list[int]:
    """Return the dimensions that a reduction with the argument `dim` adds up."""
    if dim is None or dim == []:
        return list(range(dims))
    return [d % dims for d in ([dim] if isinstance(dim, int) else dim)]
