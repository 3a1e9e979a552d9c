"""Write calls into a graph, and keep the fake value of every node beside it."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private.fake_tensors import (
    FakeTensorMode,
    is_traceable_wrapper_subclass,
)

from ..graph.context import Context
from ..graph.new_call import NewCall
from ..graph.nodes import (
    all_graphs,
    fake_mode_of,
    fake_value,
    insert_call,
)
from ..graph.sequence_tokens import TokenDim
from .graph_values import GraphValues
from .joint_calls import cp_tp_lift
from .placement_calls import cp_replicate


def _state_name(node: fx.Node) -> str:
    """Name a parameter or buffer as its model does: "layers.0.weight"."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    names = re.findall(r"\['(\w+)'\]", str(getattr(source, "name", "")))
    return ".".join(names[1:]) or node.name


class GraphWriter(GraphValues):
    """The values of a graph's nodes, and the ways to change the graph."""

    values: dict[fx.Node, Any]
    storages: dict[fx.Node, int | None]
    sequence_dims: dict[fx.Node, TokenDim]
    of_parameters: set[fx.Node]
    sharded_ids: dict[fx.Node, fx.Node]

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode) -> None:
        super().__init__(ctx, fake_mode)
        self.values, self.storages, self.sequence_dims = {}, {}, {}
        self.of_parameters, self.sharded_ids = set(), {}
        self.wrapped: dict[tuple[fx.Graph, fx.Node, Any], fx.Node] = {}

    @classmethod
    def of_sharded(cls, graph: fx.Graph, ctx: Context) -> GraphWriter:
        """Return a writer for a graph that shard_graph has gone over."""
        writer = cls(ctx, fake_mode_of(graph))
        for subgraph in all_graphs(graph):
            writer.values |= {node: fake_value(node) for node in subgraph.nodes}
        return writer

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

    def written(self, x: Any, node: fx.Node) -> Any:
        """Write the new calls in `x` before `node`; return `x` with their nodes.

        Sizes that guards have fixed become integers: no tracer has a proxy for them.
        """
        if isinstance(x, torch.SymInt):
            return x if is_symbol(x) else int(x)
        if not isinstance(x, NewCall):
            return fx.node.map_aggregate(
                x,
                lambda a: (
                    self.written(a, node)
                    if isinstance(a, NewCall | torch.SymInt)
                    else a
                ),
            )
        args, kwargs = self.written((x.args, dict(x.kwargs)), node)
        if x.target is cp_replicate:
            return self.wrap(args[0], node)
        with node.graph.inserting_before(node):
            return self.call(x.target, args, like=node, kwargs=kwargs)

    def insert_after(self, node: fx.Node, call: NewCall) -> fx.Node:
        """Let all users of a value read `call` of it, which has the same numbers."""
        with node.graph.inserting_after(node):
            new = self.call(call.target, call.args, like=node)
        self.storages[new] = self.storages.get(node)
        if node in self.of_parameters:
            self.of_parameters.add(new)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return new

    def change(self, node: fx.Node, call: NewCall) -> None:
        """Make `node` another call."""
        args, kwargs = self.written((call.args, dict(call.kwargs)), node)
        node.op = "call_method" if isinstance(call.target, str) else "call_function"
        node.target, node.args, node.kwargs = call.target, args, kwargs

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let `by` stand for `node` from here on, and erase it."""
        self.values[node] = self.values[by]
        if node in self.of_parameters:
            self.of_parameters.add(by)
        self.stand_for(node, by)
        node.replace_all_uses_with(by)
        node.graph.erase_node(node)

    def stand_for(self, node: fx.Node, by: fx.Node) -> None:
        """Note that `by` has the memory and the tokens of `node`."""
        self.storages.setdefault(by, self.storages.get(node))
        if node in self.sequence_dims:
            self.sequence_dims.setdefault(by, self.sequence_dims[node])

    def wrap_inputs(self, node: fx.Node) -> None:
        """Wrap the plain tensor arguments of a node as Replicate."""

        def wrap(argument: fx.Node) -> fx.Node:
            value = self.values[argument]
            plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
            return self.wrap(argument, node) if plain else argument

        node.args = fx.map_arg(node.args, wrap)
        node.kwargs = fx.map_arg(node.kwargs, wrap)

    def wrap(self, plain: fx.Node, node: fx.Node) -> fx.Node:
        """Return a plain tensor as Replicate, for `node` and what comes after it.

        Raises: RewriteError for a tensor of a class that cannot be made of DTensors.
        """
        joint, value = self.joint_of(node), self.values[plain]
        if is_traceable_wrapper_subclass(value):
            problem: str | None = "it meets DTensors of tensor parallelism"
            if joint is None:
                _, problem = self.trial.run(cp_replicate, (value, self.cp_axis), {})
            if problem:
                raise RewriteError(
                    f"{_state_name(plain)} is a {type(value).__name__} whose parts "
                    f"cannot be DTensors ({problem}); needed a plain tensor, or one "
                    "whose __tensor_unflatten__ takes any tensors"
                )
        call = NewCall(cp_replicate, (plain, self.cp_axis))
        if joint is not None:
            replicated = (Replicate(),) * (joint.other.ndim)
            call = NewCall(cp_tp_lift, (plain, joint.joint, self.cp_axis, replicated))
        key = (node.graph, plain, joint)
        if key not in self.wrapped:
            with node.graph.inserting_before(node):
                self.wrapped[key] = self.call(call.target, call.args, like=node)
        return self.wrapped[key]

    def forget_wrapped(self, written: fx.Node) -> None:
        """Forget the wrapped tensors in memory that is written here.

        They are wrapped anew when they are read again.
        """
        memory = self.storages.get(written)
        wrapped = self.wrapped.items()
        self.wrapped = {k: v for k, v in wrapped if self.storages.get(k[1]) != memory}

    def _inserted(self, call: NewCall, *, like: fx.Node) -> fx.Node:
        """Insert a call, and the calls of which it is one, at the insertion point."""
        args = [
            self._inserted(x, like=like) if isinstance(x, NewCall) else x
            for x in call.args
        ]
        return self.call(call.target, tuple(args), like=like)

    def reshard(self, node: fx.Node, dim: TokenDim) -> fx.Node:
        """Shard the value of `node` along `dim` for all its users."""
        users, call = set(node.users), self.cut(node, dim)
        with node.graph.inserting_before(node.next):
            sharded = self._inserted(call, like=node)
        node.replace_all_uses_with(sharded, delete_user_cb=users.__contains__)
        self.sequence_dims[sharded] = dim
        self.storages[sharded] = self.storages.get(node)
        return sharded
