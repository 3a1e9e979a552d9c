"""The inputs of a Dynamo graph: what each is, and what of it enters the program."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from cpcompile.errors import InputRejected
from cpcompile.frontend.arguments import Frame, argument_path, state_name
from cpcompile.frontend.meshes import example, real_input
from cpcompile.frontend.reducers import reducers, settled
from cpcompile.frontend.sharded_parameters import reducer_of
from cpcompile.geometry.lengths import expected, is_symbol, require
from cpcompile.logs import warn_once
from cpcompile.ops.dtensor.local_part import local_part
from cpcompile.options import GradSync, Options
from cpcompile.passes.graph.context import GraphInput, InputKind
from cpcompile.passes.graph.effects import kept_inputs
from cpcompile.passes.graph.nodes import all_nodes, fake_value, whole_value
from cpcompile.plans import Layout
from cpcompile.ranks import layout_marks
from cpcompile.ranks.layout_marks import is_marked, layout_of, layouts_in_use
from cpcompile.ranks.shardings import check_dim
from cpcompile.ranks.stand_ins import stands_for
from cpcompile.torch_patches import symbolic_tracing, tracing
from cpcompile.torch_patches.in_flight import arrived

# Marks a node whose example has symbols for sizes that guards have fixed.
_FIXED = "cp_fixed_sizes"


def classify_inputs(
    graph: fx.Graph,
    named: dict[fx.Node, tuple[str, int]],
    options: Options,
    frame: Frame,
    mesh: DeviceMesh,
) -> dict[fx.Node, GraphInput]:
    """What every graph input is; raises InputRejected for a wrong dim in `shard`.

    `named` are the inputs to shard, by the names of their nodes.
    """
    managed, local = reducers(), options.view == "local"
    if local:
        _check_local_view(graph, options, frame)
    by_name = {node.name: given for node, given in named.items()}
    kept = kept_inputs(graph)
    inputs: dict[fx.Node, GraphInput] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if whole_value(node) is not value:
            scatters = reducer_of(whole_value(node))
            gradient = settled(options.grad_sync, scatters, mesh, local)
            inputs[node] = GraphInput(
                InputKind.LOCAL_PART, gradient=gradient, reducer=str(scatters)
            )
        elif isinstance(value, DTensor) and value.device_mesh != mesh:
            gradient, by = GradSync.REDUCE, None
            if is_parameter(node):
                reducer = managed.get(id(real_input(node)))
                gradient = settled(options.grad_sync, reducer, mesh, local)
                by = None if reducer is None else str(reducer)
            if real_input(node) is example(node):
                given = GraphInput(InputKind.OTHER_AXES, gradient=gradient, reducer=by)
            else:
                given = GraphInput(
                    InputKind.OTHER_AXES,
                    placements=value.placements,
                    layout=_layout(node),
                    tokens=_tokens(node),
                )
            inputs[node] = given
        elif isinstance(value, DTensor):
            if node.name in by_name:
                warn_once(
                    f"options['shard'] names {by_name[node.name][0]!r}, which is a "
                    f"DTensor already; its own placements {value.placements} count"
                )
            whole = all(p.is_replicate() for p in value.placements)
            if node in kept and not whole:
                own = GraphInput(InputKind.KEPT, placements=value.placements)
                inputs[node] = own
                continue
            gradient = GradSync.REDUCE
            if whole and is_parameter(node):
                gradient = settled(options.grad_sync, None, value.device_mesh, local)
                if gradient is GradSync.AVERAGE:
                    raise InputRejected(
                        f"options['grad_sync'] is 'average', and the parameter "
                        f"{state_name(node) or node.name} is a DTensor; needed plain "
                        "parameters, or 'none', which leaves its gradient Partial"
                    )
            inputs[node] = GraphInput(
                InputKind.DTENSOR,
                placements=value.placements,
                layout=_layout(node),
                tokens=_tokens(node),
                gradient=gradient,
            )
        elif node.name in by_name:
            name, dim = by_name[node.name]
            dim = check_dim(f"options['shard'][{name!r}]", value, dim)
            inferred = name not in options.shard
            inputs[node] = GraphInput(InputKind.FULL, dim, name=name, inferred=inferred)
        elif isinstance(value, Tensor) and value.requires_grad:
            if is_parameter(node):
                reducer = managed.get(id(real_input(node)))
                gradient = settled(options.grad_sync, reducer, mesh, local)
                by = None if reducer is None else str(reducer)
                inputs[node] = GraphInput(
                    InputKind.PARAMETER, gradient=gradient, reducer=by
                )
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
        given = "options['mesh'] or options['shard']"
    elif frame.is_part or any(isinstance(value, DTensor) for value in values):
        return
    else:
        given = "plain tensors"
    raise InputRejected(
        f"options['view'] is 'local', and {frame.name} is called with {given}; needed "
        'DTensors of local tokens: parallelize_module(module, mesh["cp"], '
        "cp.ContextParallel({argument: dim}))"
    )


def given_layout(inputs: dict[fx.Node, GraphInput], options: Options) -> Layout | None:
    """The layout of the tokens: that of inputs, or else that of the options.

    Raises: InputRejected if there are several.
    """
    found = {x.layout for x in inputs.values()} - {Layout.CONTIGUOUS}
    if options.layout is not None and found:
        found.add(options.layout)
    if len(found) > 1:
        names = " and ".join(sorted(layout.value for layout in found))
        raise InputRejected(
            f"tokens are given and wanted in the layouts {names}; needed one: leave "
            "options['layout'] away, and pass one layout to cp.shard"
        )
    return found.pop() if found else options.layout


def symbolic_length(
    graph: fx.Graph, named: dict[fx.Node, tuple[str, int]], mesh: DeviceMesh, axis: int
) -> torch.SymInt | None:
    """The length of the sequence, if it is a symbol and may stay one.

    See Note [Symbolic sequence lengths]. Inputs of several lengths have none: the
    guards of a program are on one.
    """
    ranks = mesh.size(axis)
    values = map(fake_value, graph.find_nodes(op="placeholder"))
    if any(isinstance(x, DTensor) and x.device_mesh != mesh for x in values):
        return None  # parts of parts are of numbers
    if any(
        _layout(node) is not Layout.CONTIGUOUS
        for node in graph.find_nodes(op="placeholder")
    ):
        return None  # a permutation is of so many tokens
    sizes = list(_sequence_sizes(graph, named, axis))
    symbols = [size for size, _ in sizes if is_symbol(size)]
    if not symbols:
        return None
    length: torch.SymInt = symbols[0]
    value = expected(length)
    if value % ranks or value < 2 * ranks or any(expected(n) != value for n in symbols):
        return None
    for size, local in sizes:
        if is_symbol(size) and local is not None:
            require(size == local * ranks)
    for n in symbols:
        require(n == length)
    require(length % ranks == 0)
    require(length >= 2 * ranks)
    return length


def _sequence_sizes(
    graph: fx.Graph, named: dict[fx.Node, tuple[str, int]], axis: int
) -> Iterator[tuple[Any, Any]]:
    """Global and, of DTensors, local size of the inputs' sequence dimensions."""
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        if isinstance(value, DTensor):
            placement = value.placements[axis]
            if isinstance(placement, Shard) and not is_parameter(node):
                dim = placement.dim
                yield value.shape[dim], value.to_local().shape[dim]
        elif node in named:
            name, dim = named[node]
            dim = check_dim(f"options['shard'][{name!r}]", value, dim)
            yield value.shape[dim], None


def specialize_sizes(graph: fx.Graph, length: torch.SymInt | None = None) -> None:
    """All symbolic sizes but those made of `length` get their value.

    Asking a symbol for its value adds the guard that makes Dynamo recompile for others.
    """
    kept = set() if length is None else length.node.expr.free_symbols
    for node in graph.find_nodes(op="placeholder"):
        value = fake_value(node)
        sizes: list[Any] = [value] if isinstance(value, torch.SymInt) else []
        if isinstance(value, Tensor):
            sizes += [*value.shape, *value.stride()]
        if isinstance(value, DTensor):
            local = value.to_local()
            sizes += [*local.shape, *local.stride()]
        for size in sizes:
            if is_symbol(size) and not size.node.expr.free_symbols <= kept:
                if length is not None and expected(size) == expected(length):
                    require(size == length)  # as of a mask, which nothing shards
                else:
                    int(size)
        if isinstance(value, DTensor) and not is_parameter(node):
            argument = node.meta.get("grapharg")
            if argument is not None:
                if real_input(node) is argument.example:
                    tracing.guard_global_shape(argument.source, value.shape)
                tracing.guard_equal(argument.source, layout_marks.ATTRIBUTE)
    _specialize_floats(graph)
    fixed = functools.cache(symbolic_tracing.with_fixed_sizes)  # nodes share values
    for node in all_nodes(graph):
        if "example_value" not in node.meta:
            continue
        kind = Tensor if node.op == "placeholder" else DTensor
        value = pytree.tree_map_only(kind, fixed, fake_value(node))
        if node.op == "placeholder" and value is not fake_value(node):
            node.meta[_FIXED] = True
        node.meta["example_value"] = value


def _specialize_floats(graph: fx.Graph) -> None:
    """Floats that Dynamo hands over as tensors, as with dynamic=True, get their value.

    They are epsilons and scales, which plans and trials have to know.
    """
    for node in graph.find_nodes(op="call_method", target="item"):
        value = fake_value(node)
        if isinstance(value, torch.SymFloat) and node.args[0].op == "placeholder":
            number = float(value)
            for user in list(node.users):
                user.args, user.kwargs = fx.map_arg(
                    (user.args, user.kwargs),
                    lambda x: number if x is node else x,  # noqa: B023
                )
            graph.erase_node(node)


def _tokens(node: fx.Node) -> int:
    """Length of the sequence of an input that is not in the contiguous layout."""
    value = fake_value(node)
    if _layout(node) is Layout.CONTIGUOUS:
        return 0
    return next(int(value.shape[p.dim]) for p in value.placements if p.is_shard())


def _layout(node: fx.Node) -> Layout:
    """The layout with which a DTensor input is marked."""
    x = real_input(node)
    if not isinstance(x, DTensor):
        return Layout.CONTIGUOUS
    if layouts_in_use() and not (is_marked(x) or is_parameter(node)):
        warn_once(
            f"DTensor input {node.name} is taken as tokens in order: if it was "
            f"computed from one that cp.shard made in layout {layouts_in_use()}, "
            "results are wrong; pass what cp.shard returned"
        )
    return layout_of(x)


def is_parameter(node: fx.Node) -> bool:
    """Whether a graph input is a leaf whose gradient an optimiser will read."""
    return isinstance(real_input(node), torch.nn.Parameter)


def local_value(x: Any, given: GraphInput) -> Any:
    """What enters a compiled program for an input; differentiable."""
    x = stands_for(x)
    if given.kind is InputKind.LOCAL_PART:
        return local_part(x)
    if not given.is_dtensor:
        return arrived(x)
    if given.gradient is GradSync.REDUCE or given.kind is InputKind.OTHER_AXES:
        return local_part(x)
    return x.to_local(grad_placements=[Partial()] * len(given.placements))


def example_of(node: fx.Node, example: Any) -> Any:
    """An input without a local part while it is compiled.

    It is real, or fake where it then has integers for sizes that guards have fixed.
    """
    return fake_value(node) if _FIXED in node.meta else arrived(example)


def local_example(node: fx.Node) -> Tensor:
    """The same of a DTensor while it is compiled."""
    local: Tensor = fake_value(node)
    return local.detach().requires_grad_(local.requires_grad)
