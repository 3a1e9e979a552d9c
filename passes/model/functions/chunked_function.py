"""Share out an autograd.Function that works on its tokens chunk by chunk.

    autograd_function_apply(forward, backward, x, weight, labels)   x: [256, 64] S(0)
      ->
    cp_place(labels, (S(0),))
    cp_row_parallel_function(x, weight, cp_place)

Fused losses are such functions: they compute logits, loss and gradients of some tokens
at a time, so that the logits of all tokens never exist. DTensor would gather every
chunk. If the program treats all tokens alike (`chunk_flow.py`), a rank runs it on its
own tokens, forward and backward; sums over the tokens are sums over the ranks, and
nothing is sent but the gradients of what all ranks have.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import (
    autograd_function_apply,
    get_decompositions,
)

from ...graph.calls import spelled
from ...graph.constant_arguments import ConstantArgument, graph_text
from ...graph.effects import view_of
from ...graph.new_call import NewCall
from ...placement.decisions import Decision, FallBack, Propagate
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_place
from .chunk_flow import ChunkFlow, NotAlike
from .chunk_rules import RULES
from .chunk_values import ChunkRows, ChunkSum, Piece, Value, Whole
from .function_bodies import (
    FunctionBodies,
    function_bodies,
    functional_bodies,
)
from .local_program import LocalProgram
from .row_questions import RowQuestions

aten = torch.ops.aten
# Losses in terms that DTensor has rules for, and products without a sum in them.
_DECOMPOSED = (
    aten.nll_loss_forward, aten.nll_loss_backward, aten.mse_loss,
    aten.mse_loss_backward, aten.smooth_l1_loss, aten.binary_cross_entropy_with_logits,
)  # fmt: skip


def _addmm(
    added: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    product = x @ y if alpha == 1 else alpha * (x @ y)
    return product + (added if beta == 1 else beta * added)


_TABLE = {**get_decompositions(_DECOMPOSED), aten.addmm.default: _addmm}


def chunked_function(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on an autograd.Function that takes its tokens in chunks; else None."""
    values = [known.value(x) for x in node.args[2:]]
    dims = {number: _row_dim(known, x) for number, x in enumerate(values)}
    split = {number: dim for number, dim in dims.items() if dim is not None}
    lengths = {values[number].shape[dim] for number, dim in split.items()}
    if len(lengths) != 1 or any(map(is_symbol, lengths)):
        return None
    both = function_bodies(node)
    if node.kwargs.get("dirty_idx") or not _takes_parts(both):
        return None
    if known.joint_of(node) is not None or _are_split_otherwise(values, split):
        return None
    bodies = functional_bodies(node, _TABLE)
    if bodies is None:
        return None
    (tokens,) = lengths
    questions = RowQuestions(known.trial.fake_mode, known.ctx.mesh.device_type)
    names = [_name(x) for x in node.args[2:]]
    inputs = bodies.forward.graph.find_nodes(op="placeholder")
    names_of = dict(zip(inputs, names, strict=True))
    flow = ChunkFlow(int(tokens), questions, names_of, RULES)
    try:
        flows = _read(flow, bodies, split)
    except NotAlike as reason:
        if not flow.slices:
            return None
        return FallBack(f"it takes its tokens in chunks, and {reason}")
    if not flow.slices:
        return None
    group = known.ctx.group_name
    (like, *_) = (values[i].placements for i in split)
    args: list[Any] = list(node.args[2:])
    for number, dim in flows.cut.items():
        placed = _placements(like, known.ctx.axis, dim)
        args.append(NewCall(cp_place, (node.args[2 + number], known.cp_axis, placed)))
    program = ChunkProgram(both, flows, split, known.ctx.axis, group, dict(node.kwargs))
    return Propagate(NewCall(cp_row_parallel_function, (program, *args)))


def _takes_parts(bodies: FunctionBodies) -> bool:
    """Tell whether any call takes a part of a tensor, or puts parts together."""
    graphs = (bodies.forward.graph, bodies.backward.graph)
    return any(spelled(node) in _PARTS for graph in graphs for node in graph.nodes)


_PARTS = {
    "getitem", "setitem", "narrow", "slice", "slice_scatter", "split", "chunk", "cat",
    "split_with_sizes", "tensor_split", "stack",
}  # fmt: skip


def _name(argument: Any) -> str:
    """Name an argument; names are equal for the same views of the same value."""
    if not isinstance(argument, fx.Node):
        return repr(argument)
    if view_of(argument) is None:
        return argument.name
    args, kwargs = fx.node.map_arg((argument.args, argument.kwargs), _name)
    return str((argument.target, args, kwargs))


def _row_dim(known: GraphValues, value: Any) -> int | None:
    """Return an argument's dimension that the sequence's axis splits, or None."""
    if not isinstance(value, DTensor):
        return None
    dim: int | None = getattr(value.placements[known.ctx.axis], "dim", None)
    return dim


def _are_split_otherwise(values: Sequence[Any], split: dict[int, int]) -> bool:
    """Tell whether more than the tokens is split, or these in several ways."""
    placements = [x.placements for x in values if isinstance(x, DTensor)]
    kinds = set()
    for i in split:
        kinds |= {
            (type(p), getattr(p, "split_factor", 0))
            for p in values[i].placements
            if not p.is_replicate()
        }
    split_count = sum(not p.is_replicate() for x in placements for p in x)
    return len(kinds) > 1 or split_count > len(split)


def _placements(
    like: tuple[Placement, ...], axis: int, dim: int | None
) -> tuple[Placement, ...]:
    """Return the placements of rows along `dim`, split as in `like`."""
    placements: list[Placement] = [Replicate()] * len(like)
    split: Any = like[axis]
    if dim is not None:
        factor = getattr(split, "split_factor", None)
        placements[axis] = (
            Shard(dim) if factor is None else type(split)(dim, split_factor=factor)
        )
    return tuple(placements)


@dataclass(frozen=True)
class _Flows:
    """Both graphs of a function, and the values of their nodes and results.

    results: how many results the forward has, its saved values not counted.
    cut: arguments that every rank has and of which it needs its own rows too, by their
        number, with the dimension of these rows.
    """

    bodies: FunctionBodies
    values: dict[fx.Node, Any]
    forward: Sequence[Value | None]
    backward: Sequence[Value | None]
    results: int
    cut: dict[int, int]


def _read(flow: ChunkFlow, bodies: FunctionBodies, split: dict[int, int]) -> _Flows:
    """Follow the tokens through both graphs of a function.

    Raises: NotAlike.
    """
    inputs = list(bodies.forward.graph.find_nodes(op="placeholder"))

    def rows(node: fx.Node, dim: int) -> ChunkRows:
        piece = Piece(0, flow.tokens, flow.made("rows", node.name))
        return ChunkRows(dim, (piece,), lambda program: program.input(node))

    forward = flow.read(
        bodies.forward.graph,
        {inputs[i]: rows(inputs[i], dim) for i, dim in split.items()},
    )
    cut = {i: flow.cut_inputs[x] for i, x in enumerate(inputs) if x in flow.cut_inputs}
    returned: Any = bodies.forward.graph.output_node().args[0]
    outs, saved = returned
    results = len(pytree.tree_leaves(outs))
    assert results + len(saved) == len(forward), "results and saved values"
    incoming: dict[fx.Node, Value] = {}
    placeholders = bodies.backward.graph.find_nodes(op="placeholder")
    for number, (node, value) in enumerate(zip(placeholders, forward, strict=True)):
        if isinstance(value, ChunkRows):
            incoming[node] = rows(node, value.dim)
        elif isinstance(value, ChunkSum) and number >= results:
            piece = Piece(0, flow.tokens, flow.made("sum", node.name))
            incoming[node] = ChunkSum((piece,), functools.partial(_input, node))
    flow.cut_inputs.clear()
    backward = flow.read(bodies.backward.graph, incoming)
    if flow.cut_inputs:
        raise NotAlike("its backward takes tokens of what it was not given by token")
    for number, value in enumerate(backward):
        dim = split.get(number, cut.get(number))
        fits = not isinstance(value, ChunkRows) or value.dim == dim
        if not fits or (number in split and not isinstance(value, ChunkRows | None)):
            raise NotAlike(f"gradient {number} is not that of its tokens")
    return _Flows(bodies, dict(flow.values), forward, backward, results, cut)


def _input(node: fx.Node, program: LocalProgram) -> fx.Node:
    return program.input(node)


@dataclass(frozen=True, repr=False, eq=False)
class ChunkProgram(ConstantArgument):
    """A function of the user that takes its tokens in chunks, for the rows of a rank.

    whole: its graphs as they are. rows: the arguments with rows, and where they have
    them. options: keywords of the original call.
    """

    whole: FunctionBodies
    flows: _Flows
    rows: dict[int, int]
    axis: int
    group: str
    options: dict[str, Any]

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:  # type: ignore[override]
        bodies = self.flows.bodies
        return (
            self.whole.forward,
            self.whole.backward,
            bodies.forward,
            bodies.backward,
        )

    def text(self) -> str:
        parts = (self.rows, self.axis, self.group, self.options, self.flows.cut)
        return "\n".join([str(parts), *map(graph_text, self.graphs)])

    @functools.cache  # noqa: B019  # a program lives as long as its graph
    def programs(self, count: int) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward on `count` rows."""
        bodies, flows = self.flows.bodies, self.flows
        inputs = list(bodies.forward.graph.find_nodes(op="placeholder"))
        cut = [inputs[number] for number in flows.cut]
        values, group = flows.values, self.group
        forward = LocalProgram(bodies.forward.graph, values, count, group, cut)
        backward = LocalProgram(bodies.backward.graph, values, count, group)
        return forward.finish(flows.forward), backward.finish(flows.backward)


def cp_row_parallel_function(program: ChunkProgram, *args: Any) -> Any:
    """Run a function on the rows of each rank; on plain tensors as it is."""
    flows = program.flows
    if not any(isinstance(x, DTensor) for x in args):
        whole = program.whole
        whole_args = args[: len(args) - len(flows.cut)]
        return autograd_function_apply(
            whole.forward, whole.backward, *whole_args, **program.options
        )
    first = next(iter(program.rows))
    count = int(args[first]._local_tensor.shape[program.rows[first]])
    unmarked = tuple(program.options.get("non_differentiable_idx", ()))
    like, programs = args[first].placements, program.programs(count)
    run = _ChunkPrograms(flows, *programs, like, program.axis, unmarked)
    return _OnRows.apply(run, *args)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _ChunkPrograms:
    """The programs that one call runs.

    like: the placements of its rows.
    """

    flows: _Flows
    forward: fx.GraphModule
    backward: fx.GraphModule
    like: tuple[Placement, ...]
    axis: int
    unmarked: tuple[int, ...]

    def placements(self, value: Value) -> tuple[Placement, ...]:
        dim = value.dim if isinstance(value, ChunkRows) else None
        placements = list(_placements(self.like, self.axis, dim))
        if isinstance(value, ChunkSum):
            placements[self.axis] = Partial()
        return tuple(placements)


class _OnRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _ChunkPrograms, *args: Any) -> Any:
        ctx.set_materialize_grads(False)  # zeros would be plain tensors
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        local = [x._local_tensor if isinstance(x, DTensor) else x for x in args]
        values = fx.Interpreter(run.forward).run(*local)
        results = values[: run.flows.results]
        ctx.run, ctx.mesh, ctx.results = run, mesh, results
        ctx.saved = values[run.flows.results :]
        ctx.layouts = [
            (x.shape, x.stride()) if isinstance(x, Tensor) else None for x in args
        ]
        returned: Any = run.flows.bodies.forward.graph.output_node().args[0]
        nodes, _ = returned
        wholes = [x.meta["val"] for x in pytree.tree_leaves(nodes)]
        placed = tuple(
            DTensor.from_local(
                x,
                mesh,
                run.placements(value),  # type: ignore[arg-type]  # a result is a value
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            for x, value, whole in zip(results, run.flows.forward, wholes, strict=False)
        )
        ctx.mark_non_differentiable(*(placed[i] for i in run.unmarked))
        return placed

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        run = ctx.run
        local = []
        for grad, result, value in zip(
            grads, ctx.results, run.flows.forward, strict=False
        ):
            if grad is None:
                local.append(torch.zeros_like(result))
                continue
            kind = value if isinstance(value, ChunkRows) else Whole(value.lower)
            moved = grad.redistribute(placements=run.placements(kind))
            local.append(moved.to_local())
        local_gradients = fx.Interpreter(run.backward).run(*local, *ctx.saved)
        gradients: list[Any] = []
        layouts = ctx.layouts[: len(local_gradients)]
        results = zip(local_gradients, run.flows.backward, layouts, strict=True)
        for x, value, layout in results:
            if x is None:
                gradients.append(None)
                continue
            shape, stride = layout
            gradients.append(
                DTensor.from_local(
                    x,
                    ctx.mesh,
                    run.placements(value),
                    run_check=False,
                    shape=shape,
                    stride=stride,
                )
            )
        for number in run.flows.cut:  # of its own rows, or of all
            own = isinstance(run.flows.backward[number], ChunkRows)
            gradients.append(gradients[number] if own else None)
            gradients[number] = None if own else gradients[number]
        return None, *gradients
