"""Give the nodes of a graph their values, one after another, and apply decisions.

Every node is run once on fake tensors, in order. `sharding_rules.decide` decides what
becomes of a call; see decisions.py.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import expected, is_same
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import FakeTensorMode

from ...flow.misread_rules import must_not_wait
from ...flow.reasons import in_words
from ...flow.trial import DRAWS_NUMBERS, wrong_shape
from ...graph.constant_arguments import Callee, called_name
from ...graph.context import Context
from ...graph.cp_attention import is_cp_attention
from ...graph.effects import is_in_place, view_of
from ...graph.memory_order import memory_order
from ...graph.mixer_calls import is_mixer
from ...graph.new_call import NewCall, RegionCall
from ...graph.nodes import (
    all_nodes,
    attribute_value,
    fake_value,
    module_path,
    storage,
    sub_graph,
    where,
)
from ...graph.origins import name_origin
from ...graph.sequence_tokens import TokenDim, constraint, placed_sequence_dim
from ...placement.decisions import (
    Alias,
    Decision,
    FallBack,
    Fold,
    Plain,
    Propagate,
    Replace,
    RewriteCall,
    RunOnTokenChunks,
    Write,
)
from ...placement.edge_gradients import as_if_written
from ...placement.gathered_parameters import gathered_input
from ...placement.graph_writer import GraphWriter
from ...placement.joint_calls import cp_tp_replicated
from ...placement.placement_calls import (
    cp_pin,
    cp_place,
    cp_reduce_partial,
    cp_replicated,
    cp_replicated_in_order,
)
from ..attention.find_attention import unplanned_calls
from ..moe.region_call import write_region_call
from ..mutation.write_rules import refuse_lost_writes
from .dim_flows import token_operands
from .gathered_calls import warn_of_gathered_call
from .graph_edges import enter_gathered
from .pin_gradients import inputs_to_combine, inputs_to_pin, pin_for
from .row_parallel import row_parallel
from .sequence_dims import SequenceDims, lost_dim
from .sharding_rules import decide

log = logging.getLogger(__name__)


class ShardingInterpreter(GraphWriter):
    """The state of one rewrite: the value of every node, on fake tensors."""

    def __init__(self, ctx: Context, fake_mode: FakeTensorMode) -> None:
        super().__init__(ctx, fake_mode)
        self.distributed = 0
        self.pins_of_parts: dict[fx.Node, Any] = {}  # of calls with several results
        self.region = ""  # the checkpoint region whose nodes are visited
        self.records = True  # whether autograd records what is visited

    def read_sequence_dims(self, graph: fx.Graph) -> None:
        """Find out where the tokens of values are, before anything is written."""
        ctx = self.ctx
        # Attention with an obstacle counts: sharded tokens must meet it, not evade it.
        unplanned = unplanned_calls(ctx)
        nodes = all_nodes(graph)
        operands = [
            x
            for n in nodes
            if is_cp_attention(n)
            or is_mixer(n)
            or n in unplanned
            or n.target is constraint
            for x in token_operands(n)
        ]
        fake_mode = self.trial.fake_mode
        self.tokens = SequenceDims(graph, operands, fake_mode, ctx.mesh, ctx.axis)
        for node in self.tokens.found:
            dim = self.tokens.of(node)
            if dim is not None:
                self.sequence_dims[node] = dim

    def _note_met(self, plain: Any, placed: fx.Node) -> None:
        """Remember for the report which inputs are cut as `placed`, part of `plain`."""
        sequence_dim = placed_sequence_dim(self.values[placed], self.ctx.axis)
        if sequence_dim is None:
            return
        for node, dim in self.tokens.source_inputs(plain, sequence_dim):
            graph_input = self.ctx.inputs.get(node)
            if graph_input is not None and graph_input.name is not None:
                self.ctx.findings.cut_inputs.append((graph_input.name, dim))

    def run(self, graph: fx.Graph) -> Any:
        """Walk over a graph whose inputs have values; return the output's values."""
        for node in graph.nodes:
            seen_by_dynamo = self.storages.setdefault(node, storage(node))
            dtensors = self.ctx.takes_dtensors or self.ctx.keeps_dtensors
            source = view_of(node) if dtensors else None
            if source is not None:
                # On DTensors Dynamo sees new memory where a shard is cut.
                self.storages[node] = self.storages.get(source, seen_by_dynamo)
        for node in graph.nodes:  # nodes that are inserted ahead on the way, too
            if node.op == "output":
                return self.value(node.args[0])
            if node.op == "get_attr":
                self.values.setdefault(node, attribute_value(node))
            elif (
                node.op in ("call_function", "call_method") and node not in self.values
            ):
                self.visit(node)
            if node in self.ctx.findings.mask_rows and node.users:
                self.reshard(node, TokenDim(self.ctx.findings.mask_rows[node]))
        raise AssertionError("a graph ends with its output")

    def visit(self, node: fx.Node) -> None:
        """Give a node its value, and rewrite it where plain values meet DTensors."""
        name_origin(node, self.region)
        if node.target is torch._C._set_grad_enabled:
            self.records = node.args[0] is not False
        region = sub_graph(node)
        if region is not None:
            self._run_region(node, region)
            return
        source = gathered_input(node)
        if source is not None:
            enter_gathered(self, node, source)
            return
        leaves = pytree.tree_leaves(self.value((node.args, node.kwargs)))
        distributed = is_cp_attention(node) or any(
            isinstance(x, DTensor) for x in leaves
        )
        self.distributed += distributed
        inputs = node.all_input_nodes
        if distributed and inputs and self.of_parameters.issuperset(inputs):
            self.of_parameters.add(node)
        self.apply(node, decide(self, node, distributed))

    def apply(self, node: fx.Node, decision: Decision) -> fx.Node:
        """Do what was decided; return the node that now stands for `node`."""
        if isinstance(decision, Plain | Propagate | FallBack) and decision.call:
            self.change(node, decision.call)
        match decision:
            case Plain(call):
                args, kwargs = self.value((node.args, node.kwargs))
                function = self.callable(node)
                self.values[node] = self.trial.plain(node, function, args, kwargs)
                if call is not None and is_in_place(node):
                    self.forget_wrapped(call.args[0])
                return node
            case RewriteCall(changed):
                self.change(node, changed)
                return self.apply(node, decide(self, node, True))
            case RunOnTokenChunks(changed):
                self.change(node, changed)
                args, kwargs = self.value((node.args, node.kwargs))
                value, _ = self.trial.run(self.callable(node), args, kwargs)
                node.meta["example_value"] = self.values[node] = value
                return node
            case Alias(other):
                self.replace(node, other)
                return other
            case Propagate():
                return self._propagate(node)
            case FallBack(reason):
                return self._fall_back(node, reason)
            case Replace(by):
                new: fx.Node = self.written(by, node)
                problem = wrong_shape(fake_value(node), self.values[new])
                assert problem is None, f"{new.target}: {problem}"
                self.replace(node, new)
                return new
            case Fold(region_call):
                return self._fold(region_call, node)
            case Write(base, of_node):
                return self._read_later(base, self.apply(node, of_node))

    def written(self, x: Any, node: fx.Node) -> Any:
        """Write x as a GraphWriter does; report inputs that are cut on the way."""
        new = super().written(x, node)
        if isinstance(x, NewCall) and x.target is cp_place:
            self._note_met(new.args[0], new)
        return new

    def _propagate(self, node: fx.Node) -> fx.Node:
        """Let DTensor decide the placement, or fall back to gathered tensors."""
        originals = (node.args, node.kwargs)
        try:
            self.wrap_inputs(node)
        except RewriteError as refusal:  # of the class of a parameter
            return self._fall_back(node, str(refusal))
        for argument in inputs_to_combine(self, node):
            whole = self.written(NewCall(cp_reduce_partial, (argument,)), node)
            node.replace_input_with(argument, whole)
        for argument in inputs_to_pin(self, node):
            pinned = self.written(NewCall(cp_pin, (argument,)), node)
            self.storages[pinned] = self.storages.get(argument)
            node.replace_input_with(argument, pinned)
        args, kwargs = self.value((node.args, node.kwargs))
        result, problem = self.trial.run(self.callable(node), args, kwargs)
        pin = pin_for(self, node, problem, self.pins_of_parts)
        problem = problem if pin is None else None
        problem = problem or wrong_shape(fake_value(node), result)
        on_rows = row_parallel(self, node, result)
        if on_rows is not None:
            call, result = on_rows
            self.change(node, call)
        elif problem is not None:
            node.args, node.kwargs = originals
            return self._fall_back(node, problem)
        node.meta["example_value"] = self.values[node] = result
        again = self._shard_again(node)
        if must_not_wait(result):
            pin = cp_reduce_partial
        elif pin is not None and not isinstance(result, DTensor):
            self.pins_of_parts[node] = pin
            pin = None
        pinned = node if pin is None else self.insert_after(node, NewCall(pin, (node,)))
        return pinned if again is node else again

    def _fold(self, region_call: RegionCall, node: fx.Node) -> fx.Node:
        """Write one call for several; it is visited in its place."""
        call, *parts = write_region_call(region_call, node)
        for part, result in zip(parts, region_call.results, strict=True):
            self.stand_for(result, part)
        return call

    def _fall_back(self, node: fx.Node, problem: str) -> fx.Node:
        """Gather, compute on every rank and shard again, with one warning.

        Returns the node that now stands for `node`.
        """
        call = self.callable(node)
        refuse_lost_writes(self, node, problem)
        args, kwargs = self.value((node.args, node.kwargs))
        text = (
            f"{called_name(node)} at {where(node)} runs on gathered tensors, because "
            f"DTensor cannot shard it here ({in_words(problem)}); the result is "
            "correct, only slower"
        )
        warn_of_gathered_call(self.ctx, node, (args, kwargs), text)
        whole: Any = cp_replicated
        held: tuple[Any, ...] = (Callee(call), self.cp_axis)
        if self.joint_of(node) is not None:
            whole, held = cp_tp_replicated, (Callee(call),)
            self.wrap_inputs(node)
        elif problem == DRAWS_NUMBERS:
            order = memory_order(fake_value(node))
            whole, held = cp_replicated_in_order, (*held, order)
        with node.graph.inserting_before(node):
            gathered = self.call(
                whole, (*held, *node.args), like=node, kwargs=node.kwargs
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
        again = self._shard_again(gathered)
        if again is gathered and len(dims) == 1:
            again = self.reshard(gathered, TokenDim(dims.pop()))
        return again

    def _read_later(self, base: fx.Node, written: fx.Node) -> fx.Node:
        """Let later readers of `base` read what was written, sharded as `base` is."""
        if not self.records and not isinstance(self.values[written], tuple | list):
            call = NewCall(as_if_written, (base, written))
            written = self.insert_after(written, call)
        order = {n: i for i, n in enumerate(base.graph.nodes)}
        for user in list(base.users):
            if user is not written and order[user] > order[written]:
                user.replace_input_with(base, written)
        if base not in self.sequence_dims:
            return written
        self.sequence_dims.setdefault(written, self.sequence_dims[base])
        return self._shard_again(written)

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

    def _shard_again(self, node: fx.Node) -> fx.Node:
        """Shard an activation that lost its sharding; return what stands for it."""
        dim = lost_dim(self, node)
        if dim is None:
            return node
        log.debug("%s: sharded again along %s", node.name, dim)
        if node in self.tokens.begins:
            shape = [expected(n) for n in self.values[node].shape]
            self.ctx.findings.token_origins.append(
                f"{module_path(node)} {node.name} {shape}"
            )
        return self.reshard(node, dim)
