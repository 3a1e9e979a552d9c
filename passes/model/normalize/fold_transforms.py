"""Make one call of what runs inside of torch.func transforms.

    _vmap_increment_nesting = _vmap_increment_nesting(2, error)
    _add_batch_dim = _add_batch_dim(x, 0, 1)
    mul = mul(_add_batch_dim, 2)
    _remove_batch_dim = _remove_batch_dim(mul, 1, 2, 0)
    _vmap_decrement_nesting = _vmap_decrement_nesting()
      ->
    cp_transform = cp_transform(x)
    getitem = getitem(cp_transform, 0)

The calls inside depend on each other: some change a state, and the others work on
tensors that are wrapped for it. As one call they are tried on DTensors like any other,
and gathered if DTensor cannot do it. Transforms that read no floating-point numbers,
such as those that build masks, stay. Attention inside raises in strict mode.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.errors import RewriteError
from cpcompile.torch_private.operators import (
    get_dynamic_layer_stack_depth,
    pop_dynamic_layer_stack_and_undo_to_depth,
)

from ...graph.constant_arguments import GraphArgument
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_graphs, fake_value, insert_call, where
from ...graph.transforms import transforms


@graph_pass(
    reads=(
        "calls",
        "mask_rows",
    ),
    writes=("fallback_calls",),
)
def fold_transforms(graph: fx.Graph, ctx: Context) -> int:
    """Fold every region of transforms into one call; return the number of regions.

    Regions that make masks, or read no floating-point tensors, stay.

    Raises: RewriteError if strict, for attention inside of a region.
    """
    regions = [
        region
        for subgraph in all_graphs(graph)
        for region in transforms(subgraph)
        if not ctx.findings.mask_rows.keys() & set(region)
        and any(map(_is_float, _read(region)))
    ]
    for region in regions:
        calls = [call for call in ctx.findings.calls if call.node in region]
        reason = None
        if calls:
            reason = f"attention at {where(calls[0].node)}: {calls[0].unsupported}"
        if reason is not None and ctx.strict:
            raise RewriteError(reason)
        folded = _fold(region)
        if reason is not None:
            ctx.findings.fallback_calls[folded.name] = reason
    return len(regions)


def _read(region: list[fx.Node]) -> list[fx.Node]:
    """Return what a region reads from outside."""
    inside = set(region)
    read = (x for node in region for x in node.all_input_nodes)
    return [x for x in dict.fromkeys(read) if x not in inside]


def _is_float(node: fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _fold(region: list[fx.Node]) -> fx.Node:
    """Replace a region by one call after it; return that call."""
    graph, inside, last = region[0].graph, set(region), region[-1]
    read = _read(region)
    outputs = [node for node in region if not node.users.keys() <= inside]
    body = fx.Graph()
    copies = {node: body.placeholder(node.name) for node in read}
    for node in region:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(tuple(copies[node] for node in outputs))
    owner = graph.owning_module
    assert owner is not None, "Dynamo's graphs belong to a module"
    held = GraphArgument(fx.GraphModule(owner, body))
    written = (node for node in region if _is_written_by_user(node))
    with graph.inserting_after(last):
        values, like = tuple(fake_value(node) for node in outputs), next(written, last)
        folded = insert_call(
            graph, cp_transform, (held, *read), like=like, value=values
        )
    with graph.inserting_after(folded):
        for number, node in reversed(list(enumerate(outputs))):
            args, value = (folded, number), fake_value(node)
            part = insert_call(graph, operator.getitem, args, like=node, value=value)
            outside = [user for user in node.users if user not in inside]
            for user in outside:
                user.replace_input_with(node, part)
    for node in reversed(region):
        graph.erase_node(node)
    return folded


def _is_written_by_user(node: fx.Node) -> bool:
    line = where(node)
    return "File" in line and "/torch/" not in line


def cp_transform(body: GraphArgument, *args: Any) -> Any:
    """Run the calls of a region of transforms."""
    depth = get_dynamic_layer_stack_depth()
    try:
        return body.run(*args)
    except BaseException:  # the calls that end what was begun have not run
        pop_dynamic_layer_stack_and_undo_to_depth(depth)
        with contextlib.suppress(RuntimeError):
            torch._C._exit_dual_level(level=0)
        raise
