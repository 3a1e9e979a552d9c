"""Parameters that `cp.shard_parameters` has sharded enter a graph by their local part.

    placeholder (DTensor) -> whole_parameter -> the graph
      ->
    placeholder (local)   -> cp_gather_parameter -> the graph

Everything after the gather reads a plain parameter, as if nothing were sharded.
See Note [Sharded parameters].

Note [Sharded parameters]
AOTAutograd traces the gather as a collective and its backward as a reduce-scatter, so
that both are in the compiled program, where Inductor's passes put them in buckets. The
partitioner is told to compute the gathered parameter again in the backward, which is to
gather it again: only the local part lives from the forward to the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from cpcompile.errors import RewriteError
from cpcompile.ops.dtensor.whole_parameter import DType, gathered, whole_parameter

from ..graph.constant_arguments import MeshAxis
from ..graph.nodes import (
    RECOMPUTE_LAST,
    WHOLE,
    concrete_layout,
    fake_value,
    sub_graph,
    where,
)

_OF = "cp_gathers"  # in the meta of a call: the name of the input that it gathers


def sharded_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs that are sharded parameters and still DTensors."""
    return {source for source, _ in _readings(graph)}


def read_local_parts(graph: fx.Graph) -> None:
    """Make inputs that are sharded parameters stand for their local parts, in place.

    `whole_value` gives the parameter of such an input then.

    Raises: RewriteError if something reads one of them in another way.
    """
    parameters: dict[fx.Node, DTensor] = {}
    for source, node in list(_readings(graph)):
        whole = parameters.setdefault(source, fake_value(source))
        x, param_dtype, reduce_dtype, reshard = node.args
        node.target = cp_gather_parameter
        cp_axis, layout = MeshAxis(whole.device_mesh), concrete_layout(whole)
        how: Any = (cp_axis, whole.placements, *layout, param_dtype, reduce_dtype)
        node.args = (x, *how)
        node.meta[_OF] = source.name
        if reshard:
            node.meta |= RECOMPUTE_LAST
    for source, whole in parameters.items():
        local = whole.to_local().detach().requires_grad_(whole.requires_grad)
        for name in _names_of(source):
            name.meta |= {WHOLE: whole, "example_value": local}


def cp_gather_parameter(
    x: Tensor,
    cp_axis: MeshAxis,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    param_dtype: DType = None,
    reduce_dtype: DType = None,
) -> Tensor:
    """Gather a sharded parameter from its local part."""
    layout = (placements, shape, stride)
    return gathered(x, cp_axis.mesh, *layout, param_dtype, reduce_dtype)


def gathered_input(node: fx.Node) -> str | None:
    """Return the name of the input that a call gathers; None for another call."""
    name: str | None = node.meta.get(_OF)
    return name


def _readings(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (input, call) for each call of whole_parameter.

    Raises: RewriteError if another call reads such an input.
    """
    for source in graph.find_nodes(op="placeholder"):
        if not isinstance(fake_value(source), DTensor):
            continue
        names = _names_of(source)
        readers = [user for name in names for user in name.users if not sub_graph(user)]
        reading = [node for node in readers if node.target is whole_parameter]
        for node in readers:
            if reading and node not in reading:
                raise RewriteError(
                    f"{node.name} at {where(node)} reads {source.name}, the local part "
                    "of a parameter that cp.shard_parameters has sharded; needed "
                    "module.name, which is the whole parameter"
                )
        for node in reading:
            yield source, node


def _names_of(source: fx.Node) -> list[fx.Node]:
    """Return an input and the placeholders that it has in checkpoint regions."""
    names = [source]
    for name in names:  # which grows
        for user in name.users:
            region = sub_graph(user)
            if region is None:
                continue
            inner = region.graph.find_nodes(op="placeholder")
            pairs = zip(inner, user.args[1:], strict=True)
            names += [x for x, argument in pairs if argument is name]
    return names
