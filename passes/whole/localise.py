"""Make the joint graph of the whole sequence that of one rank.

    mul(x [2, 37, 8], w [8])        ->  mul(x [2, 19, 8], w [8])
    weight_gradient(dy, x) [8, 8]   ->  weight_gradient(dy, x), all_reduce

Each call, forward and backward alike, runs once on fake DTensors, whose rules say where
results lie; the local calls that DTensor makes of it take its place. So nothing is said
here of what a call means.

Note [Plain values and their parts]
A value that is made of no parameter and no activation (ids, labels, positions, masks)
is small, and is computed whole on every rank. If it has tokens, this rank's part of it
is computed beside it, as long as that takes no message. Where such a value meets an
activation or a parameter, as in an embedding, its part is read: so activations begin as
shards. What is not read is dead code in the end.

Note [Calls that DTensor cannot do]
Whether DTensor has a rule is found out by asking it. Where it raises, or gives a result
of another shape, the call runs on whole tensors on every rank. Where ranks do not
divide the tokens their shards differ, and so may what fails: what one gathers, all
gather.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.logs import warn_once
from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import detect_fake_mode, failing_quietly

from ..graph.constant_arguments import MeshAxis
from ..graph.context import InputKind
from ..graph.graph_pass import graph_pass
from ..graph.nodes import where
from .call_rules import CallRules
from .edges import Edges, gradient_as, placed_as
from .local_calls import Decompositions, LocalCalls, copied, replicated

_OURS = "cp"  # operators that read what they need of a value that is whole


@dataclass(frozen=True)
class WholeProgram:
    """What the passes on the joint graph of the whole sequence know beside it.

    table: how local calls are decomposed, as the compiler after them wants it.
    """

    edges: Edges
    table: Decompositions


@graph_pass(writes=("outputs", "gathered_results"))
def localise(graph: fx.Graph, program: WholeProgram) -> int:
    """Rewrite the graph; return how many calls there were. All ranks call this."""
    ctx, joint = program.edges.ctx, graph.owning_module
    assert joint is not None, "AOTAutograd's graphs have a module"
    inputs = [x.meta.get("val") for x in graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(inputs)
    assert fake_mode is not None, "AOTAutograd's inputs are fake"
    failed: dict[str, str] | None = {}
    with fake_mode, torch.no_grad(), failing_quietly():
        while failed is not None:
            attempt = Localise(joint, program, failed)
            attempt.run()
            of_ranks = map(json.loads, ctx.all_gather_text(json.dumps(attempt.failed)))
            if (failed := _union(list(of_ranks))) is not None:
                attempt.undo()
        count = attempt.finish()
    results = program.edges.results
    ctx.findings.outputs[:] = map(results.get, range(program.edges.count))
    return count


def _union(of_ranks: list[dict[str, str]]) -> dict[str, str] | None:
    """Join the calls that fail on any rank; None if they are the same on all."""
    union = {name: why for found in of_ranks for name, why in found.items()}
    if all(found.keys() == union.keys() for found in of_ranks):
        return None
    return union


class Localise:
    """One attempt to rewrite a joint graph.

    failed: calls that run on whole tensors, by the node's name, with the reason.
    """

    def __init__(
        self, joint: fx.GraphModule, program: WholeProgram, failed: dict[str, str]
    ) -> None:
        self.graph, self.joint = joint.graph, joint
        self.edges, self.ctx = program.edges, program.edges.ctx
        self.failed = dict(failed)
        self.calls = LocalCalls(self.ctx.mesh, program.table)
        self.rules = CallRules(MeshAxis(self.ctx.mesh, self.ctx.axis))
        # Values of the nodes, and the local nodes that have them; structures of both.
        self.values: dict[fx.Node, Any] = {}
        self.local: dict[fx.Node, Any] = {}
        self._inputs: dict[fx.Node, Tensor] = {}  # that are shards outside
        # Note [Plain values and their parts]
        self.plain: set[fx.Node] = set()
        self.parts: dict[fx.Node, tuple[Any, Any]] = {}
        self._old = [x for x in self.graph.nodes if x.op == "call_function"]
        self._results = self.graph.output_node().args
        self._lengths: set[int] = set()

    def run(self) -> None:
        """Write the local nodes in front of the output, and have it return them."""
        output = self.graph.output_node()
        for node in self.graph.find_nodes(op="placeholder"):
            self._note_length(node)
        with self.graph.inserting_before(output):
            for node in [
                x for x in self.graph.nodes if x.op in ("placeholder", "get_attr")
            ]:
                self._enter(node)
            for node in self._old:
                self._visit(node)
            leaves, tree = pytree.tree_flatten(output.args[0])
            notes = pytree.tree_leaves(output.meta.get("desc"))
            if len(notes) != len(leaves):
                notes = [None] * len(leaves)
            pairs = zip(leaves, notes, strict=True)
            leaves = [self._leave(x, note) for x, note in pairs]
        output.args = (pytree.tree_unflatten(leaves, tree),)

    def undo(self) -> None:
        """Erase what was written, and have the graph return what it did."""
        self.graph.output_node().args = self._results
        old = {*self._old}
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and node not in old:
                self.graph.erase_node(node)

    def finish(self) -> int:
        """Erase what is of the whole sequence; return how many calls that were."""
        for node in reversed(self._old):
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        for node, value in self._inputs.items():
            node.meta["val"] = value
        for name, reason in self.failed.items():
            warn_once(f"{name} runs on gathered tensors, because {reason}")
        return len(self._old)

    # Edges

    def _note_length(self, node: fx.Node) -> None:
        known, _ = self.edges.input(node)
        if known is None:
            return
        for p in self.edges.placements_inside(known):
            if isinstance(p, Shard):
                self._lengths.add(int(node.meta["val"].shape[p.dim]))

    def _enter(self, node: fx.Node) -> None:
        """Give an input its value; a gradient of a result gets it when it is read."""
        value = node.meta.get("val")
        if value is None and node.op == "get_attr":
            value = getattr(self.joint, str(node.target))
        if self.edges.result_of_tangent(node) is not None:
            return
        self.values[node], self.local[node] = value, node
        self.plain.add(node)
        known, learns = self.edges.input(node)
        if known is None or not isinstance(value, Tensor):
            return
        placements = self.edges.placements_inside(known)
        whole = replicated(value, self.ctx.mesh)
        if known.has_local_part:
            shard = self._given(node, whole, placements)
            if value.is_floating_point():
                self.plain.discard(node)
                self.values[node] = shard
            else:
                self.parts[node] = shard, node
                to = (shard, self.edges.everywhere)
                gathered, self.local[node] = self._write(placed_as, to, (node,), node)
                self.values[node] = gathered._local_tensor
        elif known.kind is InputKind.FULL:
            part = self._write(placed_as, (whole, placements), (node,), node)
            if value.is_floating_point():
                self.plain.discard(node)
                self.values[node], self.local[node] = part
            else:
                self.parts[node] = part
        elif learns:
            self.plain.discard(node)
            self.values[node] = whole

    def _given(self, node: fx.Node, whole: DTensor, placements: Any) -> DTensor:
        """Return the shard that an input is outside."""
        shard = placed_as(whole, placements)
        self._inputs[node] = shard._local_tensor
        return shard

    def _enter_gradient(self, node: fx.Node, place: int) -> None:
        result = self._result_at(place)
        placements = self.edges.leaves(place, result, self.values[result])
        whole = replicated(node.meta["val"], self.ctx.mesh)
        self.values[node] = self._given(node, whole, placements)
        self.local[node] = node

    def _result_at(self, place: int) -> fx.Node:
        output = self.graph.output_node()
        leaves: Any = pytree.tree_leaves(self._results[0])
        notes = pytree.tree_leaves(output.meta["desc"])
        places = map(self.edges.place, notes)
        found: fx.Node = dict(zip(places, leaves, strict=True))[place]
        return found

    def _leave(self, x: Any, note: Any) -> Any:
        """Return the local node of a result."""
        if not isinstance(x, fx.Node):
            return x
        value = self._value(x)
        place, known = self.edges.place(note), self.edges.gradient(note)
        if place is not None:
            placements = self.edges.leaves(place, x, value)
        if not isinstance(value, DTensor):
            return self.local[x]
        if known is not None:
            outside = self.edges.everywhere
            if known.has_local_part:
                outside = self.edges.placements_inside(known)
            args: Any = (value, known, outside)
            return self._write(gradient_as, args, (self.local[x],), x)[1]
        if place is None:
            placements = self.edges.everywhere
        return self._write(placed_as, (value, placements), (self.local[x],), x)[1]

    # Calls

    def _value(self, node: fx.Node) -> Any:
        if node not in self.values:
            place = self.edges.result_of_tangent(node)
            assert place is not None, f"{node} has no value"
            self._enter_gradient(node, place)
        return self.values[node]

    def _visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._pick(node)
            return
        operands = node.all_input_nodes
        for x in operands:
            self._value(x)
        if all(x in self.plain for x in operands):
            self.plain.add(node)
            self.values[node], self.local[node] = self._of(node, set())
            self._part_of(node)
        elif node.name in self.failed:
            self.values[node], self.local[node] = self._of_whole(node)
        else:
            self.values[node], self.local[node] = self._of_shards(node)

    def _pick(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        self.values[node] = self.values[source][index]
        self.local[node] = self.local[source][index]
        if source in self.plain:
            self.plain.add(node)
        if source in self.parts:
            value, local = self.parts[source]
            self.parts[node] = value[index], local[index]

    def _part_of(self, node: fx.Node) -> None:
        """Compute this rank's part of a plain value, if that takes no message."""
        with_parts = {x for x in node.all_input_nodes if x in self.parts}
        if not with_parts:
            return
        try:
            call, operands = self._local_call(node, with_parts)
        except Exception as error:  # whatever DTensor's rules raise
            check_refusal(error, f"the part of {node.target}")
            return
        value = pytree.tree_unflatten(list(call.results), call.tree)
        if call.sends or _shape_problem(value, node.meta["val"]):
            return
        if any(self._is_shard(x) for x in call.results):
            self.parts[node] = value, copied(call, operands, self.graph, node)

    def _is_shard(self, x: Any) -> bool:
        # A part of a flattened batch is no Shard.
        return isinstance(x, DTensor) and hasattr(x.placements[self.ctx.axis], "dim")

    def _of_shards(self, node: fx.Node) -> tuple[Any, Any]:
        """Write a call on shards, or else on whole tensors."""
        ours = getattr(node.target, "namespace", "") == _OURS
        parts = set() if ours else {x for x in node.all_input_nodes if x in self.parts}
        try:
            call, operands = self._local_call(node, parts)
            value = pytree.tree_unflatten(list(call.results), call.tree)
            problem = _shape_problem(value, node.meta["val"])
        except Exception as error:  # whatever DTensor's rules raise
            check_refusal(error, f"{node.target} on shards")
            problem = f"DTensor cannot shard it here ({_first_line(error)})"
        if problem is not None:
            self.failed[node.name] = f"{node.target} at {where(node)}: {problem}"
            return self._of_whole(node)
        return self._shared_out(value, copied(call, operands, self.graph, node), node)

    def _of_whole(self, node: fx.Node) -> tuple[Any, Any]:
        """Write a call on whole tensors, and cut the result as activations are."""
        whole: dict[fx.Node, tuple[Any, Any]] = {}
        for x in node.all_input_nodes:
            value, local = self.values[x], self.local[x]
            if isinstance(value, DTensor):
                to = (value, self.edges.everywhere)
                value, local = self._write(placed_as, to, (local,), x)
                value = value._local_tensor
            whole[x] = value, local
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: whole[x][0])
        operands = [whole[x][1] for x in _operands(node)]
        call: Any = node.target
        values, local = self._write(call, args, operands, node, kwargs)
        return self._cut(values, local, node)

    def _cut(self, values: Any, local: Any, node: fx.Node) -> tuple[Any, Any]:
        """Cut whole results along the dimension in which operands are cut."""
        given = [self.values[x] for x in node.all_input_nodes]
        places = [x.placements for x in given if self._is_shard(x)]
        leaves, tree = pytree.tree_flatten(values)
        nodes = pytree.tree_leaves(local)
        pairs = []
        for x, own in zip(leaves, nodes, strict=True):
            pair = (x, own)
            if isinstance(x, Tensor):
                pair = (replicated(x, self.ctx.mesh), own)
                for placements in places:
                    dim = getattr(placements[self.ctx.axis], "dim", x.ndim)
                    if dim < x.ndim and x.shape[dim] in self._lengths:
                        to = self.edges.on_axis(Shard(dim))
                        pair = self._write(placed_as, (pair[0], to), (own,), node)
                        break
            pairs.append(pair)
        return tuple(
            pytree.tree_unflatten(list(part), tree) for part in zip(*pairs, strict=True)
        )

    def _of(self, node: fx.Node, parts: set[fx.Node]) -> tuple[Any, Any]:
        call, operands = self._local_call(node, parts)
        value = pytree.tree_unflatten(list(call.results), call.tree)
        return value, copied(call, operands, self.graph, node)

    def _local_call(
        self, node: fx.Node, parts: set[fx.Node]
    ) -> tuple[Any, list[fx.Node]]:
        """Return what a call is on this rank, and its operands; some are parts."""

        def value_of(x: fx.Node) -> Any:
            return self.parts[x][0] if x in parts else self.values[x]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        call = self.calls.of(self.rules.of(node.target), args, kwargs)
        tensors = [x for x in _operands(node) if isinstance(value_of(x), Tensor)]
        return call, [
            self.parts[x][1] if x in parts else self.local[x] for x in tensors
        ]

    def _write(
        self,
        call: Callable[..., Any],
        args: Any,
        operands: Sequence[Any],
        like: fx.Node,
        kwargs: Any = {},  # noqa: B006
    ) -> tuple[Any, Any]:
        """Write a call; return its value and its local nodes."""
        known = self.calls.of(call, args, kwargs)
        value = pytree.tree_unflatten(list(known.results), known.tree)
        return value, copied(known, operands, self.graph, like)

    def _shared_out(self, value: Any, local: Any, like: fx.Node) -> tuple[Any, Any]:
        """Bring the partial sums of an activation to the ranks that hold its tokens."""
        if not isinstance(value, DTensor) or value.ndim < 3:
            return value, local
        if not value.placements[self.ctx.axis].is_partial():
            return value, local
        for dim in range(1, value.ndim - 1):
            if value.shape[dim] in self._lengths:
                placements = list(value.placements)
                placements[self.ctx.axis] = Shard(dim)
                return self._write(
                    placed_as, (value, tuple(placements)), (local,), like
                )
        return value, local


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among the arguments of a call, as often as they are there."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [x for x in leaves if isinstance(x, fx.Node)]


def _shape_problem(value: Any, known: Any) -> str | None:
    """Say where a result has another shape than the call gives on whole tensors."""
    pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(known), strict=False)
    for x, whole in pairs:
        if isinstance(x, Tensor) and x.shape != whole.shape:
            return f"it gives {list(x.shape)} of {list(whole.shape)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
