"""The state of the sharding pass, and what it does with one node after another.

Every node is run once on fake tensors, in order. Rules that know better than DTensor's
propagation arrive as `Rules`; see shard_graph.py.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from cpcompile.errors import CannotRewrite
from cpcompile.geometry.lengths import expected, is_same
from cpcompile.logs import warn_once
from cpcompile.passes.attention.find_attention import unplanned_calls
from cpcompile.passes.attention.insert_attention import is_cp_attention
from cpcompile.passes.graph.context import Context, InputKind
from cpcompile.passes.graph.memory_order import memory_order
from cpcompile.passes.graph.nodes import (
    all_nodes,
    attribute_value,
    fake_value,
    may_be_view,
    module_path,
    storage,
    sub_graph,
    where,
)
from cpcompile.passes.graph.origins import name_origin
from cpcompile.passes.graph.sequence_tokens import TokenDim, placed_sequence_dim
from cpcompile.passes.propagation.graph_writer import GraphWriter
from cpcompile.passes.propagation.misread_rules import must_not_wait
from cpcompile.passes.propagation.row_proofs import RowProofs
from cpcompile.passes.propagation.trial import (
    DRAWS_NUMBERS,
    WritesArguments,
    wrong_shape,
)
from cpcompile.passes.sharding.by_rows import by_rows
from cpcompile.passes.sharding.lost_sharding import lost_dim
from cpcompile.passes.sharding.pin_gradients import pin_for, pin_gradients
from cpcompile.passes.sharding.sequence_dims import SequenceDims

log = logging.getLogger(__name__)


class Rules(Protocol):
    """What is done with a node; each says whether it gave the node its value."""

    def of_plain(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """For a call without DTensors."""

    def of_distributed(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """For attention and writes, which may not be left to DTensor."""

    def by_target(self, sharder: ShardingInterpreter, node: fx.Node) -> bool:
        """For a call with DTensors that DTensor would do wrong or wastefully."""


class ShardingInterpreter(GraphWriter):
    """The state of one rewrite: the value of every node, on fake tensors.

    rules: what gives a node its value where neither plain tensors nor DTensor's own
        propagation do.
    """

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode, rules: Rules) -> None:
        super().__init__(ctx, fake_mode)
        self.rules = rules
        self.named_dims: dict[fx.Node, int] = {}
        self.sharded_ids: dict[fx.Node, fx.Node] = {}
        self.distributed = 0
        self.distributed_inputs = any(
            given.kind is InputKind.DTENSOR for given in ctx.inputs.values()
        )
        self.last_entered: fx.Node | None = None
        self.pins_of_parts: dict[fx.Node, Any] = {}  # of calls with several results
        self.region = ""  # the checkpoint region whose nodes are visited
        self.row_proofs = RowProofs(fake_mode, ctx.mesh.device_type)

    def read_sequence_dims(self, graph: fx.Graph) -> None:
        """Find out where the tokens of values are, before anything is written."""
        ctx = self.ctx
        # An obstacle is found where tokens arrive sharded: it is to be met, not evaded.
        unplanned = unplanned_calls(ctx)
        nodes = all_nodes(graph)
        calls = [n for n in nodes if is_cp_attention(n) or n in unplanned]
        fake_mode = self.trial.fake_mode
        self.tokens = SequenceDims(graph, calls, fake_mode, ctx.mesh, ctx.axis)
        for node in self.tokens.found:
            dim = self.tokens.of(node)
            if dim is not None:
                self.sequence_dims[node] = dim

    def note_met(self, plain: Any, placed: fx.Node) -> None:
        """Remember for the report which inputs are cut as `placed`, part of `plain`."""
        found = placed_sequence_dim(self.values[placed], self.ctx.axis)
        if found is None:
            return
        for node, dim in self.tokens.inputs_behind(plain, found):
            given = self.ctx.inputs.get(node)
            if given is not None and given.name is not None:
                self.ctx.met.append((given.name, dim))

    def run(self, graph: fx.Graph) -> Any:
        """Walk over a graph whose inputs have values; returns the output's values."""
        for node in graph.nodes:
            seen_by_dynamo = self.storages.setdefault(node, storage(node))
            if self.distributed_inputs and may_be_view(node):
                # On DTensors Dynamo sees new memory where a shard is cut.
                (first, *_) = node.all_input_nodes or [node]
                self.storages[node] = self.storages.get(first, seen_by_dynamo)
        for node in list(graph.nodes):
            if node.op == "output":
                return self.value(node.args[0])
            if node.op == "get_attr":
                self.values.setdefault(node, attribute_value(node))
            elif (
                node.op in ("call_function", "call_method") and node not in self.values
            ):
                self.visit(node)
            if node in self.ctx.mask_rows and node.users:
                self.reshard(node, TokenDim(self.ctx.mask_rows[node]))
        raise AssertionError("a graph ends with its output")

    def visit(self, node: fx.Node) -> None:
        """Give a node its value, and rewrite it where the domains meet."""
        name = name_origin(node, self.region)
        region = sub_graph(node)
        if region is not None:
            self._run_region(node, region)
            return
        args, kwargs = self.value((node.args, node.kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = any(isinstance(x, DTensor) for x in leaves)
        if not distributed and not is_cp_attention(node):
            if not self.rules.of_plain(self, node):
                self.values[node] = self.trial.plain(
                    node, self.callable(node), args, kwargs
                )
            return
        self.distributed += 1
        if node.all_input_nodes and all(
            n in self.of_parameters for n in node.all_input_nodes
        ):
            self.of_parameters.add(node)
        if self.rules.of_distributed(self, node):
            return
        if name in self.ctx.unforeseen and not is_cp_attention(node):
            self.fall_back(node, self.ctx.unforeseen[name])
            return
        if not self.rules.by_target(self, node):
            self.propagate(node)

    def propagate(self, node: fx.Node) -> None:
        """Let DTensor decide the placement, or fall back to gathered tensors."""
        originals = (node.args, node.kwargs)
        self.wrap_inputs(node)
        pin_gradients(self, node)
        call = self.callable(node)
        args, kwargs = self.value((node.args, node.kwargs))
        result, problem = self.trial.run(call, args, kwargs)
        pin = pin_for(self, node, problem, self.pins_of_parts)
        problem = problem if pin is None else None
        problem = problem or wrong_shape(fake_value(node), result)
        if not by_rows(self, self.row_proofs, node, result):
            if problem is not None:
                node.args, node.kwargs = originals
                self.fall_back(node, problem)
                return
            self.values[node] = result
        node.meta["example_value"] = self.values[node]
        self.shard_again(node)
        if must_not_wait(self.values[node]):
            self.insert_after(node, self.calls.whole)
        elif pin is not None and isinstance(self.values[node], DTensor):
            self.insert_after(node, pin)
        elif pin is not None:
            self.pins_of_parts[node] = pin

    def insert_after(self, node: fx.Node, call: Any) -> fx.Node:
        """Let all users of a value have call(value), which has the same numbers."""
        with node.graph.inserting_after(node):
            new = self.call(call, (node,), like=node)
        self.storages[new] = self.storages.get(node)
        if node in self.of_parameters:
            self.of_parameters.add(new)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        return new

    def fall_back(self, node: fx.Node, problem: str) -> fx.Node:
        """Gather, compute on every rank, shard again; with one warning.

        Returns the node that now stands for `node`.
        """
        call = self.callable(node)
        name = getattr(call, "__name__", str(call))
        self._refuse_lost_writes(node, problem)
        warn_once(
            f"{name} at {where(node)} runs on gathered tensors, because DTensor cannot "
            f"shard it here ({problem}); the result is correct, only slower"
        )
        args, kwargs = self.value((node.args, node.kwargs))
        order = memory_order(fake_value(node)) if problem == DRAWS_NUMBERS else None
        whole = self.calls.replicated(call, order)
        with node.graph.inserting_before(node):
            gathered = self.call(whole, node.args, like=node, kwargs=node.kwargs)
        self.replace(node, gathered)
        out = self.values[gathered]
        dims = {
            p.dim
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, DTensor)
            and isinstance(out, DTensor)
            and x.ndim == out.ndim
            for p in x.placements
            if isinstance(p, Shard) and is_same(x.shape[p.dim], out.shape[p.dim])
        }
        again = self.shard_again(gathered)
        if again is gathered and len(dims) == 1:
            again = self.reshard(gathered, TokenDim(dims.pop()))
        return again

    def reshard(self, node: fx.Node, dim: TokenDim) -> fx.Node:
        """As a GraphWriter does; the result stands for the memory of `node`."""
        sharded = super().reshard(node, dim)
        self.storages[sharded] = self.storages.get(node)
        return sharded

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """As a GraphWriter does; `by` stands for the memory of `node`."""
        self.storages.setdefault(by, self.storages.get(node))
        super().replace(node, by)

    def forget_wrapped(self, written: fx.Node) -> None:
        """Wrap plain tensors anew that lie in memory that is written here."""
        memory = self.storages.get(written)
        kept = self.wrapped.items()
        self.wrapped = {k: v for k, v in kept if self.storages.get(k[1]) != memory}

    def _run_region(self, node: fx.Node, region: fx.GraphModule) -> None:
        inner = region.graph.find_nodes(op="placeholder")
        for placeholder, argument in zip(inner, node.args[1:], strict=True):
            self.values[placeholder] = self.value(argument)
            if argument in self.of_parameters:
                self.of_parameters.add(placeholder)
        outside, self.region = self.region, f"{self.region}{node.name}/"
        self.values[node] = self.run(region.graph)
        self.region = outside
        region.graph.lint()
        region.recompile()

    def shard_again(self, node: fx.Node) -> fx.Node:
        """Shard an activation that lost its sharding; returns what stands for it."""
        dim = lost_dim(self, node)
        if dim is None:
            return node
        log.debug("%s: sharded again along %s", node.name, dim)
        if node in self.tokens.begins:
            shape = [expected(n) for n in self.values[node].shape]
            self.ctx.began.append(f"{module_path(node)} {node.name} {shape}")
        return self.reshard(node, dim)

    def _refuse_lost_writes(self, node: fx.Node, problem: str) -> None:
        """Raise CannotRewrite for a call that would write to a gathered copy."""
        leaves = pytree.tree_leaves(self.value((node.args, node.kwargs)))
        written = problem.leaves if isinstance(problem, WritesArguments) else ()
        if any(isinstance(leaves[number], DTensor) for number in written):
            raise CannotRewrite(
                f"{node.name} at {where(node)} writes into an argument without saying "
                "so; needed one that returns new tensors, or an operator whose "
                "mutates_args name what it writes"
            )
