"""The local values of a joint graph, as they are written call by call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.torch_private import pytree

from ..graph.sequence_tokens import TokenDim
from .edges import Edges, placed_as
from .local_calls import LocalCall, LocalCalls, copied
from .other_axes import Chunks
from .token_order import TokenOrder, in_natural_order, in_order, relaid

Pair = tuple[Any, Any]
"""A value, and the local node that has it; or equal structures of both."""


@dataclass(frozen=True)
class Made:
    """How a call has become local.

    call: None if it runs on whole tensors. scattered: whether its sums were brought to
    the ranks that hold their tokens.
    """

    call: LocalCall | None
    scattered: bool = False


class LocalValues:
    """What the nodes of a graph of the whole sequence are on this rank.

    values: DTensors; plain tensors where all ranks have the same. local: the local
    nodes that have them. plain, parts: Note [Plain values and their parts]; parts by
    whether the tokens are laid out. made: how each call that is not plain was made.
    own_moves: the moves on other axes that are moves of this rank's tokens.
    like: the node on whose behalf nodes are written.
    """

    like: fx.Node

    def __init__(
        self, graph: fx.Graph, edges: Edges, calls: LocalCalls, order: TokenOrder
    ) -> None:
        self.graph, self.edges, self.ctx = graph, edges, edges.ctx
        self.calls, self.order = calls, order
        self.sides = (False,) if order.layout is Layout.CONTIGUOUS else (False, True)
        self.values: dict[fx.Node, Any] = {}
        self.local: dict[fx.Node, Any] = {}
        self.plain: set[fx.Node] = set()
        self.parts: dict[bool, dict[fx.Node, Pair]] = {False: {}, True: {}}
        self.made: dict[fx.Node, Made] = {}
        self.chunks: dict[fx.Node, Chunks] = {}  # Note [Token chunks]
        self.own_moves: set[fx.Node] = set()
        self._relaid: dict[fx.Node, Pair] = {}
        self._ordered: dict[Any, Pair] = {}

    def write(
        self,
        call: Callable[..., Any],
        args: Any,
        operands: Sequence[Any],
        kwargs: Any = {},  # noqa: B006
    ) -> Pair:
        """Write a call for the present node; return its value and its local nodes."""
        known = self.calls.of(call, args, kwargs)
        return value_of(known), copied(known, operands, self.graph, self.like)

    def cut(self, whole: DTensor, local: Any, placements: Any, laid_out: bool) -> Pair:
        """Cut what every rank has in whole, in the order of the tokens."""
        like = placed_as(whole, placements)
        tokens = self.order.tokens_of(like) if laid_out else None
        if tokens is not None:
            whole, local = self.in_layout(whole, local, tokens[1], tokens[0])
        return self.write(placed_as, (whole, placements), (local,))

    def in_layout(self, value: Any, local: Any, dim: TokenDim, length: int) -> Pair:
        """Lay out what every rank has in whole, once for all that read it."""
        key = local, isinstance(value, DTensor), dim, length
        if key not in self._ordered:
            args = value, dim, self.order.of_length(length)
            self._ordered[key] = self.write(in_order, args, (local,))
        return self._ordered[key]

    def tokens_of_chunk(self, value: DTensor, chunks: Chunks) -> TokenLayout | None:
        """Return the layout of the tokens that laid out chunks are of."""
        tokens = self.order.tokens_of(value)
        if tokens is None:
            return None
        return self.order.of_length(tokens[0] * chunks.count)

    def gathered(self, shard: DTensor, local: Any, laid_out: bool) -> Pair:
        """Gather a value, in natural order."""
        tokens = self.order.tokens_of(shard) if laid_out else None
        pair = self.write(placed_as, (shard, self.edges.everywhere), (local,))
        if tokens is None:
            return pair
        length, dim = tokens
        args = pair[0], dim, self.order.of_length(length)
        return self.write(in_natural_order, args, (pair[1],))

    def ordered_as(self, x: fx.Node, laid_out: bool) -> Pair:
        """Return a value with its tokens in an order."""
        pair = self.values[x], self.local[x]
        tokens = None if x in self.plain else self.order.tokens_of(pair[0])
        if tokens is None or self.order.is_laid_out(x) is laid_out:
            return pair
        if x not in self._relaid:
            layouts = self.order.layouts(not laid_out)
            how = (tokens[1].dim, *layouts, self.ctx.group_name)
            self._relaid[x] = self.write(relaid, (pair[0], *how), (pair[1],))
        return self._relaid[x]

    def is_shard(self, x: Any) -> bool:
        # A part of a flattened batch is no Shard.
        return isinstance(x, DTensor) and hasattr(x.placements[self.ctx.axis], "dim")


def value_of(call: LocalCall) -> Any:
    return pytree.tree_unflatten(list(call.results), call.tree)
