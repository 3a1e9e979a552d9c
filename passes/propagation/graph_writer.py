"""Writes calls into a graph and keeps the fake value of every node beside it."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Placement, Replicate

from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import (
    all_graphs,
    fake_mode_of,
    fake_value,
    insert_call,
)
from cpcompile.passes.graph.sequence_tokens import TokenDim
from cpcompile.passes.propagation.placement_calls import (
    PlacementCalls,
    method_call,
    placement_calls,
)
from cpcompile.passes.propagation.trial import Trial


class GraphWriter:
    """The values of a graph's nodes, on fake tensors, and the ways to change it."""

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode) -> None:
        self.ctx = ctx
        self.calls: PlacementCalls = placement_calls(ctx)
        self.trial = Trial(fake_mode, symbolic=ctx.length is not None)
        self.values: dict[fx.Node, Any] = {}
        # Which memory a value has; what a pass inserts stands for that of another.
        self.storages: dict[fx.Node, int | None] = {}
        # Along which dimension a value that leads to attention is split.
        self.sequence_dims: dict[fx.Node, TokenDim] = {}
        self.of_parameters: set[fx.Node] = set()
        self.wrapped: dict[tuple[fx.Graph, fx.Node], fx.Node] = {}

    @classmethod
    def of_sharded(cls, graph: fx.Graph, ctx: Context) -> GraphWriter:
        """To change a graph that shard_graph has gone over."""
        writer = cls(ctx, fake_mode_of(graph))
        for each in all_graphs(graph):
            writer.values |= {node: fake_value(node) for node in each.nodes}
        return writer

    def value(self, argument: Any) -> Any:
        """The fake value of an argument, which may be nested."""
        return fx.node.map_aggregate(
            argument,
            lambda a: self.values[a] if isinstance(a, fx.Node) else a,
        )

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        *,
        like: fx.Node,
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Insert a call at the insertion point of `like`'s graph, and run it."""
        values = self.value((args, kwargs or {}))
        result = self.trial.must_run(target, *values)
        node = insert_call(
            like.graph, target, args, like=like, value=result, kwargs=kwargs
        )
        self.values[node] = result
        return node

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let `by` stand for `node` from here on, and erase it."""
        self.values[node] = self.values[by]
        if node in self.of_parameters:
            self.of_parameters.add(by)
        if node in self.sequence_dims:
            self.sequence_dims.setdefault(by, self.sequence_dims[node])
        node.replace_all_uses_with(by)
        node.graph.erase_node(node)

    def wrap_inputs(self, node: fx.Node) -> None:
        """Wrap the plain tensor arguments of a node as Replicate."""

        def wrap(argument: fx.Node) -> fx.Node:
            value = self.values[argument]
            if not isinstance(value, Tensor) or isinstance(value, DTensor):
                return argument
            key = (node.graph, argument)
            if key not in self.wrapped:
                with node.graph.inserting_before(node):
                    self.wrapped[key] = self.call(
                        self.calls.replicate, (argument,), like=node
                    )
            return self.wrapped[key]

        node.args = fx.map_arg(node.args, wrap)
        node.kwargs = fx.map_arg(node.kwargs, wrap)

    def shard(self, node: fx.Node, dim: TokenDim, *, like: fx.Node) -> fx.Node:
        """Insert what splits the value of `node` along `dim`."""
        if dim.outer == 1:
            return self.call(self.calls.shard, (node, dim.dim), like=like)
        value = self.values[node]
        placements: list[Placement] = [Replicate()] * self.ctx.mesh.ndim
        if isinstance(value, DTensor):
            placements = list(value.placements)
        placements[self.ctx.axis] = dim.placement
        return self.call(self.calls.place, (node, tuple(placements)), like=like)

    def reshard(self, node: fx.Node, dim: TokenDim) -> fx.Node:
        """Shard the value of `node` along `dim` for all its users."""
        with node.graph.inserting_after(node):
            sharded = self.shard(node, dim, like=node)
        node.replace_all_uses_with(
            sharded, delete_user_cb=lambda user: user is not sharded
        )
        self.sequence_dims[sharded] = dim
        return sharded

    def callable(self, node: fx.Node) -> Any:
        """What a node calls, as a function; methods become functions."""
        return method_call(node.target) if isinstance(node.target, str) else node.target
