"""Turns the global program into a sharded one, by DTensors inside of the graph.

    tokens, weight -> embedding -> ... -> cross_entropy
      ->
    cp_replicate(weight), cp_shard(tokens, 1) -> embedding -> ... -> cp_cross_entropy
      -> cp_gather

Every node is run once on fake tensors, in order. Values are in one of two domains:
plain (the same on every rank: integers, masks, positions, buffers, what is made of
them) and DTensor (parameters, activations). A node that has only plain inputs stays as
it is. Where the domains meet, plain inputs are wrapped as Replicate, and DTensor's own
sharding propagation decides the placement of the result. What it cannot do, or would
do wrong, is the business of `sharding_rules`, which also holds the fallback: gather,
compute on every rank, shard again.

AOTAutograd then traces through the DTensors, so that the compiled program consists of
local operators and collectives only.

"""

from __future__ import annotations

import logging
from typing import Any

import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from cpcompile.lengths import expected, is_same
from cpcompile.logs import warn_once
from cpcompile.passes.by_rows import by_rows
from cpcompile.passes.context import Context, InputKind
from cpcompile.passes.find_attention import is_attention
from cpcompile.passes.functionalise_writes import steps_to_part
from cpcompile.passes.graph import (
    all_nodes,
    attribute_value,
    fake_mode_of,
    fake_value,
    is_in_place,
    may_be_view,
    module_path,
    storage,
    sub_graph,
    where,
)
from cpcompile.passes.graph_edges import enter_input, leave_outputs, output_nodes
from cpcompile.passes.graph_writer import GraphWriter
from cpcompile.passes.insert_attention import is_cp_attention
from cpcompile.passes.lost_sharding import lost_dim
from cpcompile.passes.misread_rules import must_not_wait
from cpcompile.passes.pin_gradients import pin_gradients
from cpcompile.passes.row_proofs import RowProofs
from cpcompile.passes.sequence_tokens import TokenDim, placed_stream
from cpcompile.passes.sharding_rules import RULES, left_attention
from cpcompile.passes.token_streams import TokenStreams
from cpcompile.passes.trial import wrong_shape
from cpcompile.passes.trial_backward import OnlyWholeGradients
from cpcompile.passes.write_rules import (
    in_place,
    refuse_lost_writes,
    write_part,
)

log = logging.getLogger(__name__)


def shard_graph(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite; returns how many calls run on DTensors, 0 if nothing is sharded."""
    starts = any(
        given.kind in (InputKind.FULL, InputKind.DTENSOR)
        for given in ctx.inputs.values()
    )
    if not starts and not ctx.plans:
        ctx.outputs = [None for _ in output_nodes(graph)]
        return 0
    sharder = Sharder(ctx, fake_mode_of(graph))
    sharder.read_streams(graph)
    for node, given in ctx.inputs.items():
        enter_input(sharder, node, given)
    sharder.run(graph)
    leave_outputs(sharder, graph)
    for plain in sharder.sharded_ids:
        if not plain.users:
            graph.erase_node(plain)
    for node, value in sharder.values.items():
        node.meta["example_value"] = value
    return sharder.distributed


class Sharder(GraphWriter):
    """The state of one rewrite: the value of every node, on fake tensors."""

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode) -> None:
        super().__init__(ctx, fake_mode)
        self.named_dims: dict[fx.Node, int] = {}
        self.sharded_ids: dict[fx.Node, fx.Node] = {}
        self.distributed = 0
        self.distributed_inputs = any(
            given.kind is InputKind.DTENSOR for given in ctx.inputs.values()
        )
        self.storages: dict[fx.Node, int | None] = {}
        self.last_entered: fx.Node | None = None
        self.row_proofs = RowProofs(fake_mode, ctx.mesh.device_type)

    def read_streams(self, graph: fx.Graph) -> None:
        """Find out where the tokens of values are, before anything is written."""
        ctx = self.ctx
        calls = [node for node in all_nodes(graph) if is_cp_attention(node)]
        fake_mode = self.trial.fake_mode
        self.tokens = TokenStreams(graph, calls, fake_mode, ctx.mesh, ctx.axis)
        for node in self.tokens.found:
            dim = self.tokens.of(node)
            if dim is not None:
                self.streams[node] = dim

    def note_met(self, plain: Any, placed: fx.Node) -> None:
        """Remember for the report which inputs are cut as `placed`, part of `plain`."""
        found = placed_stream(self.values[placed], self.ctx.axis)
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
        region = sub_graph(node)
        if region is not None:
            self._run_region(node, region)
            return
        args, kwargs = self.value((node.args, node.kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = any(isinstance(x, DTensor) for x in leaves)
        if not distributed and not is_cp_attention(node):
            rule = RULES.get(node.target)
            if rule is None or not rule(self, node):
                self.values[node] = self.trial.plain(
                    node, self.callable(node), args, kwargs
                )
            return
        self.distributed += 1
        if node.all_input_nodes and all(
            n in self.of_parameters for n in node.all_input_nodes
        ):
            self.of_parameters.add(node)
        if is_attention(node):
            left_attention(self, node)
            return
        if is_in_place(node):
            in_place(self, node)
            return
        steps = steps_to_part(node)
        if steps is not None:
            write_part(self, node, steps)
            return
        rule = RULES.get(node.target)
        if rule is None or not rule(self, node):
            self.propagate(node)

    def propagate(self, node: fx.Node) -> None:
        """Let DTensor decide the placement, or fall back to gathered tensors."""
        originals = (node.args, node.kwargs)
        self.wrap_inputs(node)
        pin_gradients(self, node)
        call = self.callable(node)
        args, kwargs = self.value((node.args, node.kwargs))
        result, problem = self.trial.run(call, args, kwargs)
        whole_gradients = isinstance(problem, OnlyWholeGradients) and isinstance(
            result, DTensor
        )
        problem = None if whole_gradients else problem
        problem = problem or wrong_shape(fake_value(node), result)
        if not by_rows(self, node, result):
            if problem is not None:
                node.args, node.kwargs = originals
                self.fall_back(node, problem)
                return
            self.values[node] = result
        node.meta["example_value"] = self.values[node]
        if must_not_wait(self.values[node]):
            self.insert_after(node, self.calls.whole)
        elif whole_gradients:
            self.insert_after(node, self.calls.pin)
        self.shard_again(node)

    def insert_after(self, node: fx.Node, call: Any) -> None:
        """Let all users of a value have call(value), which has the same numbers."""
        with node.graph.inserting_after(node):
            new = self.call(call, (node,), like=node)
        self.storages[new] = self.storages.get(node)
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def fall_back(self, node: fx.Node, problem: str) -> fx.Node:
        """Gather, compute on every rank, shard again; with one warning.

        Returns the node that now stands for `node`.
        """
        call = self.callable(node)
        name = getattr(call, "__name__", str(call))
        refuse_lost_writes(self, node, problem)
        warn_once(
            f"{name} at {where(node)} runs on gathered tensors, because DTensor cannot "
            f"shard it here ({problem}); the result is correct, only slower"
        )
        args, kwargs = self.value((node.args, node.kwargs))
        with node.graph.inserting_before(node):
            gathered = self.call(
                self.calls.replicated(call), node.args, like=node, kwargs=node.kwargs
            )
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
        self.values[node] = self.run(region.graph)
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
