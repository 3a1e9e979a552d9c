"""Make the joint graph of the whole sequence that of one rank.

    mul(x [2, 37, 8], w [8])        ->  mul(x [2, 19, 8], w [8])
    product(dy, x, "abc,abd->cd")   ->  product(dy, x), all_reduce

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

import functools
import json
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import hashable
from cpcompile.logs import warn_once
from cpcompile.ops.comm.communicating import communicates
from cpcompile.ops.latent_steps import WHOLE
from cpcompile.ops.shared_mixers import SPLIT_ALONG
from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import detect_fake_mode, failing_quietly

from ..graph.constant_arguments import MeshAxis
from ..graph.graph_pass import graph_pass
from ..graph.nodes import has_unknown_size, where
from ..graph.rule_to_write import rule_to_write
from .attention_nodes import (
    cut_places,
    is_attention,
    needs_order,
    note_masks,
    unread_masks,
    with_layout,
)
from .call_rules import CallRules
from .cut_constants import constants
from .edge_values import EdgeValues
from .edges import Edges, is_written_back
from .few_tokens import is_picked_often
from .keep_calls import BY_HAND
from .local_calls import Decompositions, LocalCall, LocalCalls, copied, replicated
from .local_values import Made, Pair, value_of
from .order_tokens import note_relayouts, order_tokens, relayouts
from .other_axes import MOVE, Chunks, TokenWise, chunks_after, moved
from .sequence_moves import MOVES, SPLITS
from .token_order import TokenOrder

_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
_OURS = ("cp", WHOLE)  # operators that read what they need of a value that is whole


@dataclass(frozen=True)
class WholeProgram:
    """What the passes on the joint graph of the whole sequence know beside it.

    table: how local calls are decomposed, as the compiler after them wants it.
    """

    edges: Edges
    table: Decompositions


@graph_pass(
    reads=("plans", "masks"),
    writes=("outputs", "gathered_results", "rows_by_hand", "mask_forms", "localised"),
)
def localise(graph: fx.Graph, program: WholeProgram) -> int:
    """Rewrite the graph; return how many calls there were. All ranks call this."""
    ctx, joint = program.edges.ctx, graph.owning_module
    assert joint is not None, "AOTAutograd's graphs have a module"
    inputs = [x.meta.get("val") for x in graph.find_nodes(op="placeholder")]
    fake_mode = detect_fake_mode(inputs)
    assert fake_mode is not None, "AOTAutograd's inputs are fake"
    failed: dict[str, str] | None = {}
    with (
        fake_mode,
        torch.no_grad(),
        failing_quietly(),
        warn_once.collected() as warned,
    ):
        calls = LocalCalls(ctx.mesh, program.table, _symbols(graph))
        order = TokenOrder(MeshAxis(ctx.mesh, ctx.axis))
        while failed is not None:
            attempt = Localise(joint, program.edges, calls, order, failed)
            attempt.run()
            of_ranks = map(json.loads, ctx.all_gather_text(json.dumps(attempt.failed)))
            if (failed := _union(list(of_ranks))) is not None:
                attempt.undo()
            elif order.layout is Layout.CONTIGUOUS and (found := attempt.ordered()):
                order, failed = found, attempt.failed  # once more, in it
                attempt.undo()
        count = attempt.finish()
    program.edges.note(warned)
    return count


def _is_sized_by_data(node: fx.Node) -> bool:
    """Tell whether a call returns something of a size that its data tells."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    sizes = (x for x in leaves if isinstance(x, py_sym_types))
    return has_unknown_size(leaves) or any(map(free_unbacked_symbols, sizes))


def _union(of_ranks: list[dict[str, str]]) -> dict[str, str] | None:
    """Join the calls that fail on any rank; None if they are the same on all."""
    union = {name: why for found in of_ranks for name, why in found.items()}
    if all(found.keys() == union.keys() for found in of_ranks):
        return None
    return union


class Localise(EdgeValues):
    """One attempt to rewrite a joint graph.

    failed: calls that run on whole tensors, by the node's name, with the reason.
    """

    def __init__(
        self,
        joint: fx.GraphModule,
        edges: Edges,
        calls: LocalCalls,
        order: TokenOrder,
        failed: dict[str, str],
    ) -> None:
        super().__init__(joint, edges, calls, order)
        self.failed = dict(failed)
        contiguous = replace(order, layout=Layout.CONTIGUOUS)
        self.rules = {
            laid_out: CallRules(tokens, self.lengths)
            for laid_out, tokens in ((True, order), (False, contiguous))
        }
        self.token_wise = TokenWise()
        self.old = [x for x in self.graph.nodes if x.op == "call_function"]
        self.by_data = set(filter(_is_sized_by_data, self.old))

    def run(self) -> None:
        """Write the local nodes in front of the output, and have it return them."""
        with self.graph.inserting_before(self.graph.output_node()):
            self.enter_all()
            for node in self.old:
                self._visit(node)
            self.leave_all()

    def undo(self) -> None:
        """Erase what was written, and have the graph return what it did."""
        self.return_whole()
        old = {*self.old}
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and node not in old:
                self.graph.erase_node(node)

    def finish(self) -> int:
        """Erase what is of the whole sequence; return how many calls that were."""
        masks = unread_masks(self.old, self)
        for node in reversed(self.old):
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        note_masks(masks, self)
        for node, value in self.inputs.items():
            node.meta["val"] = value
        if self.order.layout is not Layout.CONTIGUOUS:
            note_relayouts(self.ctx, relayouts(self.graph), self.order.calls)
        findings = self.ctx.findings
        for node, made in self.values.items():
            name = node.meta.get("custom", {}).get(BY_HAND)
            if name is not None and node.target in _SOFTMAX and self.is_shard(made):
                findings.rows_by_hand[name] = made.placements[self.ctx.axis].dim
        findings.localised = sum(map(self._is_shared, self.old))
        for name, reason in self.failed.items():
            warn_once(f"{name} runs on gathered tensors, because {reason}")
        return len(self.old)

    def _is_shared(self, node: fx.Node) -> bool:
        """Tell whether ranks have parts of what a call reads or returns."""
        values = [self.values.get(x) for x in (node, *node.all_input_nodes)]
        return any(map(self.is_shard, pytree.tree_leaves(values)))

    def _visit(self, node: fx.Node) -> None:
        self.like = node
        if any(x in self.by_data for x in (node, *node.all_input_nodes)):
            self._of_data(node)
            return
        if node.target is operator.getitem:
            self._pick(node)
            return
        if isinstance(node.meta.get("val"), py_sym_types):  # of the symbols
            self.values[node] = self.local[node] = node.meta["val"]
            self.plain.add(node)
            return
        operands = node.all_input_nodes
        for x in operands:
            self.value(x)
        if self.chunks:
            for place, x in enumerate(pytree.tree_leaves((node.args, node.kwargs))):
                if x in self.chunks:
                    self.in_order(x, self.order.reads_laid_out(node, place))
        if is_written_back(node):
            self.made[node] = Made(None)
            self.values[node], self.local[node] = self.write_back(*operands)
        elif all(x in self.plain for x in operands) and not is_attention(node):
            call, locals_ = self._local_call(node)
            self.values[node] = value_of(call)
            self.local[node] = copied(call, locals_, self.graph, node)
            if not isinstance(self.values[node], DTensor):  # a parameter begins
                self.plain.add(node)
                for laid_out in self.sides:
                    self._part_of(node, laid_out)
        elif node.target is MOVE:
            self._move(node)
        elif any(x in self.chunks for x in operands) and self._of_chunks(node):
            pass
        elif node.name in self.failed:
            self.values[node], self.local[node] = self._of_whole(node)
        else:
            self.values[node], self.local[node] = self._of_shards(node)

    def _of_data(self, node: fx.Node) -> None:
        """Write a call whose data tells a size, as it is, on whole tensors."""
        whole: dict[fx.Node, fx.Node] = {}
        for x in node.all_input_nodes:
            value, local = self.value(x), self.local[x]
            if isinstance(value, DTensor):
                if self.is_shard(value):
                    why = "its data tells the size of its result"
                    self.failed[node.name] = f"{node.target} at {where(node)}: {why}"
                _, local = self.gathered(value, local, self.order.is_laid_out(x))
            whole[x] = local
        own = self.graph.node_copy(node, whole.__getitem__)
        value = node.meta.get("val")
        self.made[node], self.local[node] = Made(None), own
        if isinstance(value, Tensor) and not has_unknown_size(value):
            self.values[node] = replicated(value, self.ctx.mesh)
        else:
            self.values[node] = value
            self.plain.add(node)

    def _pick(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        self.values[node] = self.values[source][index]
        self.local[node] = self.local[source][index]
        if source in self.plain:
            self.plain.add(node)
        self._note_chunks(node, self.chunks.get(source))
        for laid_out in self.sides:
            if source in self.parts[laid_out]:
                value, local = self.parts[laid_out][source]
                self.parts[laid_out][node] = value[index], local[index]

    def _part_of(self, node: fx.Node, laid_out: bool) -> None:
        """Compute this rank's part of a plain value, if that takes no message."""
        parts = self.parts[laid_out]
        if node.target is SPLIT_ALONG:
            target: Any = node.args[2]
            if target >= 0:  # on both sides, or calls would be others than were tried
                whole = replicated(self.values[node], self.ctx.mesh)
                to = self.edges.on_axis(Shard(target))
                parts[node] = self.cut(whole, self.local[node], to, laid_out)
            return
        if node.target is MOVE or all(x not in parts for x in node.all_input_nodes):
            return
        try:
            call, operands = self._local_call(node, laid_out)
        except Exception as error:  # whatever DTensor's rules raise
            check_refusal(error, f"the part of {node.target}")
            if isinstance(node.meta["val"], Tensor):
                given = [parts[x][0] for x in node.all_input_nodes if x in parts]
                own = self.values[node], self.local[node]
                pair = self._cut_alike(*own, given, laid_out)
                parts |= {node: pair} if self.is_shard(pair[0]) else {}
            return
        value = value_of(call)
        if call.sends or _shape_problem(value, node.meta["val"]):
            return
        if not any(self.is_shard(x) for x in call.results):
            return
        if laid_out and constants(call, self.order, node.target) is None:
            if isinstance(value, DTensor):  # tokens meet: cut what is whole
                whole = replicated(self.values[node], self.ctx.mesh)
                local, placements = self.local[node], value.placements
                parts[node] = self.cut(whole, local, placements, laid_out)
            return
        parts[node] = value, copied(call, operands, self.graph, node)

    def _move(self, node: fx.Node) -> None:
        """Write a move on other axes, of this rank's tokens if they may stay."""
        source: Any = node.args[0]
        text, ranks = str(node.args[1]), self.ctx.mesh.size()
        value, chunks = self.values[source], self.chunks.get(source)
        after = None
        if isinstance(value, DTensor):
            is_local, after = chunks_after(value, text, ranks, chunks)
            if chunks is not None and not is_local:
                self.order_chunks(source)
                chunks = None
            if is_local:
                self.own_moves.add(node)
        rule = None if chunks is None else functools.partial(moved, chunks=chunks)
        call, operands = self._local_call(node, self.order.is_laid_out(node), rule)
        self._have(node, call, operands, after)

    def _of_chunks(self, node: fx.Node) -> bool:
        """Write a call on token chunks, unless it needs them in order."""
        operands = [x for x in node.all_input_nodes if x in self.chunks]
        cut = [x for x in node.all_input_nodes if self.is_shard(self.values[x])]
        chunks = {self.chunks.get(x) for x in cut}
        try:
            rule = self.token_wise.of(self.rules[False].of(node.target))
            call, tensors = self._local_call(node, None, rule)
            problem = _shape_problem(value_of(call), node.meta["val"])
        except Exception as error:  # whatever DTensor's rules raise
            check_refusal(error, f"{node.target} on token chunks")
            problem = _first_line(error)
        if problem is not None or len(chunks) > 1:
            for x in operands:
                self.order_chunks(x)
            return False
        self._have(node, call, tensors, self.chunks[operands[0]])
        return True

    def _have(
        self, node: fx.Node, call: LocalCall, operands: Any, chunks: Chunks | None
    ) -> None:
        self.values[node], self.made[node] = value_of(call), Made(call)
        self.local[node] = copied(call, operands, self.graph, node)
        self._note_chunks(node, chunks)

    def _note_chunks(self, node: fx.Node, chunks: Chunks | None) -> None:
        values = pytree.tree_leaves(self.values[node])
        if chunks is not None and any(map(self.is_shard, values)):
            self.chunks[node] = chunks

    def _of_shards(self, node: fx.Node) -> Pair:
        """Write a call on shards, or else on whole tensors."""
        laid_out: bool | None = self.order.is_laid_out(node)
        operand_values = [self.values[x] for x in node.all_input_nodes]
        if not any(isinstance(x, DTensor) for x in operand_values):
            laid_out = None  # between steps that make keys of latents
        try:
            rule: Any = node.target if is_picked_often(node) else None
            call, operands = self._local_call(node, laid_out, rule)
            value = value_of(call)
            problem = _shape_problem(value, node.meta.get("val"))
            if laid_out and self._meet(node, call):
                problem = "it brings tokens together in another order than was planned"
        except Exception as error:  # whatever DTensor's rules raise
            check_refusal(error, f"{node.target} on shards")
            problem = f"DTensor cannot shard it here ({_first_line(error)})"
            given, named = fx.node.map_arg((node.args, node.kwargs), self.values.get)
            result = node.meta.get("val")
            problem += rule_to_write(node.target, where(node), given, named, result)
            if communicates(node.target) or is_attention(node):
                text = f"{node.target} at {where(node)}: {problem}"
                raise RewriteError(text) from error
        if problem is not None:
            self.failed[node.name] = f"{node.target} at {where(node)}: {problem}"
            return self._of_whole(node)
        local = copied(call, operands, self.graph, node)
        pair = self._shared_out(value, local, bool(laid_out))
        self.made[node] = Made(call, scattered=pair[0] is not value)
        return pair

    def _meet(self, node: fx.Node, call: LocalCall) -> bool:
        """Tell whether tokens may meet in a call that is on laid out ones."""
        if is_attention(node) or node.target in (*MOVES, *SPLITS):
            return False
        return constants(call, self.order, node.target) is None

    def _of_whole(self, node: fx.Node) -> Pair:
        """Write a call on whole tensors, and cut the result as activations are."""
        self.made[node] = Made(None)
        whole: dict[fx.Node, Pair] = {}
        for x in node.all_input_nodes:
            value, local = self.values[x], self.local[x]
            if isinstance(value, DTensor):
                value, local = self.gathered(value, local, self.order.is_laid_out(x))
                value = value._local_tensor
            whole[x] = value, local
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: whole[x][0])
        leaves = pytree.tree_leaves((node.args, node.kwargs))  # as often as they are
        pairs = [whole[x] for x in leaves if isinstance(x, fx.Node)]
        operands = [local for value, local in pairs if isinstance(value, Tensor)]
        call: Any = node.target
        if call is torch.ops.aten.view.default:  # rules give other orders in memory
            call = torch.ops.aten.reshape.default
        values, local = self.write(call, args, operands, kwargs)
        given = [self.values[x] for x in node.all_input_nodes]
        return self._cut_alike(values, local, given, self.order.is_laid_out(node))

    def _cut_alike(
        self, values: Any, local: Any, given: Sequence[Any], laid_out: bool
    ) -> Pair:
        """Cut whole results along the dimension in which operands are cut."""
        places = [x.placements for x in given if self.is_shard(x)]
        leaves, tree = pytree.tree_flatten(values)
        nodes = pytree.tree_leaves(local)
        pairs = []
        for x, own in zip(leaves, nodes, strict=True):
            pair = (x, own)
            if isinstance(x, Tensor):
                pair = (replicated(x, self.ctx.mesh), own)
                for placements in places:
                    dim = getattr(placements[self.ctx.axis], "dim", x.ndim)
                    if dim < x.ndim and hashable(x.shape[dim]) in self.lengths:
                        to = self.edges.on_axis(Shard(dim))
                        pair = self.cut(*pair, to, laid_out)
                        break
            pairs.append(pair)
        return tuple(
            pytree.tree_unflatten(list(part), tree) for part in zip(*pairs, strict=True)
        )

    def _local_call(
        self,
        node: fx.Node,
        laid_out: bool | None = None,
        rule: Callable[..., Any] | None = None,
    ) -> tuple[LocalCall, list[Any]]:
        """Return what a call is on this rank, and its operands.

        laid_out: whether it reads the parts of plain values, and those of which order;
            None is whole values.
        """
        args = node.args
        if laid_out and is_attention(node) and needs_order(node):
            args = with_layout(node, self.order.layout)
        leaves, tree = pytree.tree_flatten((args, node.kwargs))
        parts = (
            {}
            if laid_out is None or getattr(node.target, "namespace", "") in _OURS
            else self.parts[laid_out]
        )
        pairs: list[Pair] = [(x, None) for x in leaves]
        for place, x in enumerate(leaves):
            if isinstance(x, fx.Node):
                side = self.order.reads_laid_out(node, place)
                pairs[place] = parts[x] if x in parts else self.ordered_as(x, side)
        for place in cut_places(node) if laid_out and is_attention(node) else ():
            if self.order.reads_laid_out(node, place):
                pairs[place] = self._attended(pairs[place])
        for place in cut_places(node) if is_attention(node) else ():
            value, local = pairs[place]
            if isinstance(value, Tensor) and not isinstance(value, DTensor):
                pairs[place] = replicated(value, self.ctx.mesh), local
        rule = rule or self.rules[bool(laid_out)].of(node.target)

        def call() -> LocalCall:
            values = [value for value, _ in pairs]
            given, options = pytree.tree_unflatten(values, tree)
            return self.calls.of(rule, given, options)

        found = call()
        cut = constants(found, self.order, node.target) if laid_out else None
        if cut and not is_attention(node):
            places = [i for i, (x, _) in enumerate(pairs) if isinstance(x, Tensor)]
            for number, dim in cut.items():
                value, local = pairs[places[number]]
                length = value.shape[dim.dim] // dim.outer
                pairs[places[number]] = self.in_layout(value, local, dim, length)
            found = call()
        operands = []
        for pair in pairs:  # some stand for several values
            own = zip(*map(pytree.tree_leaves, pair), strict=True)
            operands += [x for value, x in own if isinstance(value, Tensor)]
        return found, operands

    def _attended(self, pair: Pair) -> Pair:
        """Cut an operand of attention, which DTensor would cut in natural order."""
        value, local = pair
        if not isinstance(value, Tensor):
            return pair
        if not isinstance(value, DTensor):
            value = replicated(value, self.ctx.mesh)
        elif self.is_shard(value):
            if self.order.tokens_of(value) is not None:
                return pair
            value, local = self.gathered(value, local, False)  # as parts of a batch
        placements = list(value.placements)
        placements[self.ctx.axis] = Shard(2)
        return self.cut(value, local, tuple(placements), True)

    def ordered(self) -> TokenOrder | None:
        """Decide in which order calls see tokens; None if there is only one."""
        plans = self.ctx.findings.plans.items()
        layouts = {call.q_shape[-2]: plan.layout for call, plan in plans}
        for x in self.edges.inputs:
            chunks = 1 if x.chunks is None else x.chunks.size()
            layouts[x.tokens * chunks] = x.layout
        lengths = [n for n, x in layouts.items() if x is not Layout.CONTIGUOUS]
        if not lengths:
            return None
        calls = sum(plan.layout is not Layout.CONTIGUOUS for _, plan in plans)
        layout = layouts[lengths[0]]
        order = replace(self.order, layout=layout, lengths=lengths, calls=calls)
        return order_tokens(self, self.old, self.results_with_notes(), order)

    def _shared_out(self, value: Any, local: Any, laid_out: bool) -> Pair:
        """Bring the partial sums of an activation to the ranks that hold its tokens."""
        if not isinstance(value, DTensor) or value.ndim < 3:
            return value, local
        if not value.placements[self.ctx.axis].is_partial():
            return value, local
        for dim in range(1, value.ndim - 1):
            if hashable(value.shape[dim]) in self.lengths:
                placements = list(value.placements)
                placements[self.ctx.axis] = Shard(dim)
                return self.cut(value, local, tuple(placements), laid_out)
        return value, local


def _symbols(graph: fx.Graph) -> dict[fx.Node, torch.SymInt]:
    """Return the inputs that are symbols, of which all symbolic sizes are computed."""
    inputs = ((x, x.meta.get("val")) for x in graph.find_nodes(op="placeholder"))
    return {
        x: n for x, n in inputs if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol
    }


def _shape_problem(value: Any, known: Any) -> str | None:
    """Say where a result has another shape than the call gives on whole tensors."""
    several = isinstance(known, list | tuple)
    for x, whole in zip(value, known, strict=False) if several else [(value, known)]:
        if isinstance(x, Tensor) and x.shape != whole.shape:
            return f"it gives {list(x.shape)} of {list(whole.shape)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
