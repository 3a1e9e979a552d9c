"""Classify the inputs of a Dynamo graph, and say what of each enters the program."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from cpcompile.accounting.counted_calls import line_of
from cpcompile.accounting.graph_account import Line
from cpcompile.accounting.read import Inputs
from cpcompile.cost.plans import Strategy
from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame, argument_path, state_name
from cpcompile.frontend.meshes import example, real_input
from cpcompile.frontend.reducers import active_ddp, reducers, settled
from cpcompile.frontend.sharded_parameters import reducer_of
from cpcompile.geometry.layout import Layout
from cpcompile.logs import warn_of_order, warn_unmet
from cpcompile.ops.dtensor.local_part import local_part
from cpcompile.options import GradSync, Options
from cpcompile.passes.graph.context import PARAMETERS, Context, GraphInput, InputKind
from cpcompile.passes.graph.effects import kept_inputs
from cpcompile.passes.graph.nodes import fake_value, plain_fake, whole_value
from cpcompile.ranks.layout_marks import is_marked, layout_of, layouts_in_use
from cpcompile.ranks.shardings import check_dim, unshard
from cpcompile.ranks.stand_ins import chunks_of, stands_for
from cpcompile.torch_patches.in_flight import arrived

GATHERED = (InputKind.DTENSOR, InputKind.KEPT)
"""Inputs that are gathered before a graph that every rank runs in whole."""


def classify_inputs(
    graph: fx.Graph,
    named: dict[fx.Node, tuple[str, int]],
    options: Options,
    frame: Frame,
    mesh: DeviceMesh,
) -> dict[fx.Node, GraphInput]:
    """Return what every graph input is.

    named: the inputs to shard, with name and dimension; found by the nodes' names.

    Raises: InputError for a wrong dim in `shard`.
    """
    managed, local = reducers(active_ddp()), options.local_view
    if local:
        _check_local_view(graph, options, frame)
    by_name = {node.name: name_and_dim for node, name_and_dim in named.items()}
    kept_nodes = kept_inputs(graph)
    inputs: dict[fx.Node, GraphInput] = {}

    def of_parameter(node: fx.Node) -> dict[str, Any]:
        reducer = managed.get(id(real_input(node)))
        gradient = settled(options.grad_sync, reducer, mesh, local)
        by = None if reducer is None else str(reducer)
        return {"gradient": gradient, "reducer": by}

    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if whole_value(node) is not value:
            scatters = reducer_of(whole_value(node))
            gradient = settled(options.grad_sync, scatters, mesh, local)
            inputs[node] = GraphInput(
                InputKind.LOCAL_PART, gradient=gradient, reducer=str(scatters)
            )
        elif isinstance(value, DTensor) and value.device_mesh != mesh:
            how: Any = {"gradient": GradSync.REDUCE}
            if is_parameter(node):
                how = of_parameter(node)
            inputs[node] = GraphInput(InputKind.OTHER_AXES, **how)
        elif isinstance(value, DTensor):
            if node.name in by_name:
                why = f"it is a DTensor, whose own placements {value.placements} count"
                warn_unmet(
                    frame.name, f"options['shard'][{by_name[node.name][0]!r}]", why
                )
            whole = all(p.is_replicate() for p in value.placements)
            if node in kept_nodes and not whole:
                own = GraphInput(InputKind.KEPT, placements=value.placements)
                inputs[node] = own
                continue
            gradient = GradSync.REDUCE
            if whole and is_parameter(node):
                gradient = settled(options.grad_sync, None, value.device_mesh, local)
                if gradient is GradSync.AVERAGE:
                    raise InputError(
                        f"options['grad_sync'] is 'average', and the parameter "
                        f"{state_name(node) or node.name} is a DTensor; needed plain "
                        "parameters, or 'none', which leaves its gradient Partial"
                    )
            inputs[node] = GraphInput(
                InputKind.DTENSOR,
                placements=value.placements,
                layout=layout_of_input(node),
                tokens=_tokens(node),
                gradient=gradient,
                chunks=chunks_of(example(node)),
            )
        elif node.name in by_name:
            name, dim = by_name[node.name]
            dim = check_dim(f"options['shard'][{name!r}]", value, dim)
            inferred = name not in options.shard
            inputs[node] = GraphInput(InputKind.FULL, dim, name=name, inferred=inferred)
        elif isinstance(value, Tensor) and value.requires_grad:
            if is_parameter(node):
                inputs[node] = GraphInput(InputKind.PARAMETER, **of_parameter(node))
            else:
                share = GradSync.NONE if local else GradSync.REDUCE
                inputs[node] = GraphInput(InputKind.ACTIVATION, gradient=share)
        else:
            path = argument_path(node, frame)
            inputs[node] = GraphInput(
                InputKind.PLAIN, name=None if path is None else ".".join(path)
            )
    return inputs


def _check_local_view(graph: fx.Graph, options: Options, frame: Frame) -> None:
    values = map(fake_value, graph.find_nodes(op="placeholder"))
    if options.mesh is not None or options.shard:
        actual = "options['mesh'] or options['shard']"
    elif frame.is_part or any(isinstance(value, DTensor) for value in values):
        return
    else:
        actual = "plain tensors"
    raise InputError(
        f"{frame.name} is compiled by cp.ContextParallel, and called with {actual}; "
        'needed DTensors of local tokens: parallelize_module(module, mesh["cp"], '
        "cp.ContextParallel({argument: dim}))"
    )


def given_layout(inputs: dict[fx.Node, GraphInput], options: Options) -> Layout | None:
    """Return the token layout that inputs have, or else the one of the options.

    Raises: InputError if there are several.
    """
    layouts = {x.layout for x in inputs.values()} - {Layout.CONTIGUOUS}
    if options.layout is not None and layouts:
        layouts.add(options.layout)
    if len(layouts) > 1:
        names = " and ".join(sorted(layout.value for layout in layouts))
        raise InputError(
            f"tokens are given and wanted in the layouts {names}; needed one: leave "
            "options['layout'] away, and pass one layout to cp.shard"
        )
    return layouts.pop() if layouts else options.layout


def _tokens(node: fx.Node) -> int:
    """Return the sequence length of an input in a permuted layout; 0 for others."""
    value = fake_value(node)
    if layout_of_input(node) is Layout.CONTIGUOUS:
        return 0
    return next(int(value.shape[p.dim]) for p in value.placements if p.is_shard())


def layout_of_input(node: fx.Node) -> Layout:
    """Return the layout that a DTensor input is marked with; contiguous for others."""
    x = real_input(node)
    if not isinstance(x, DTensor):
        return Layout.CONTIGUOUS
    if layouts_in_use() and not (is_marked(x) or is_parameter(node)):
        at = f"what reads the DTensor input {node.name}"
        warn_of_order(at, layouts_in_use(), "pass what cp.shard returned")
    return layout_of(x)


def is_parameter(node: fx.Node) -> bool:
    """Tell whether a graph input is a leaf whose gradient an optimiser will read."""
    return isinstance(real_input(node), torch.nn.Parameter)


def input_names(ctx: Context, frame: Frame) -> Inputs:
    """Return the inputs of a graph by the names that a user knows."""
    names, parameters = [], set()
    for place, (node, graph_input) in enumerate(ctx.inputs.items()):
        state, path = state_name(node), argument_path(node, frame)
        name = ".".join(path) if path else node.name
        names.append(state.split(" ", 1)[1] if state else graph_input.name or name)
        if is_parameter(node) or graph_input.kind in PARAMETERS:
            parameters.add(place)
    key_lines = set[Line]()
    for call, plan in ctx.findings.plans.items():
        if plan.strategy is Strategy.LATENTS:
            sources = ctx.findings.key_sources[call]
            key_lines |= set(map(line_of, (*sources.gathered, *sources.computed)))
    known = frozenset(key_lines - {Line()})
    return Inputs(tuple(names), frozenset(parameters), ctx.group_name, known)


def local_value(x: Any, graph_input: GraphInput) -> Any:
    """Return what enters a compiled program for an input; differentiable."""
    x = stands_for(x)
    if graph_input.kind is InputKind.LOCAL_PART:
        return local_part(x)
    if not graph_input.is_dtensor:
        return arrived(x)
    if (
        graph_input.gradient is GradSync.REDUCE
        or graph_input.kind is InputKind.OTHER_AXES
    ):
        return local_part(x)
    return x.to_local(grad_placements=[Partial()] * len(graph_input.placements))


def gathered_value(x: Any, graph_input: GraphInput) -> Any:
    """Return what enters a program that every rank runs in whole; differentiable."""
    if graph_input.kind in GATHERED:
        return unshard(stands_for(x))
    return local_value(x, graph_input)


def write_back(x: DTensor, whole: Tensor) -> None:
    """Put this rank's part of what a program wrote into a whole tensor into `x`."""
    everywhere = [Replicate()] * x.device_mesh.ndim
    new = DTensor.from_local(whole, x.device_mesh, everywhere, run_check=False)
    with torch.no_grad():
        x.copy_(new.redistribute(placements=x.placements))


def whole_example(node: fx.Node) -> Tensor:
    """Return the fake value of the whole of a DTensor input."""
    value = fake_value(node)
    whole: Tensor = plain_fake(value)
    return whole.requires_grad_(value.requires_grad)
