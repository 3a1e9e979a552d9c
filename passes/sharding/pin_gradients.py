"""Pins the placement of gradients that a call shards.

Note [Gradients of uneven shards]
An operator may shard a replicated operand by itself, as attention does, or an addition
to a sharded tensor. The gradient of that operand then comes back sharded, and runs into
the backwards of calls that were tried with a replicated one; where the shards are
uneven, views cannot do that. cp_pin brings such a gradient back to the placement of its
value first.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.passes.attention.insert_attention import is_cp_attention
from cpcompile.passes.propagation.graph_writer import GraphWriter
from cpcompile.passes.propagation.trial_backward import (
    OnlyUnsplitGradients,
    OnlyWholeGradients,
)


def pin_gradients(writer: GraphWriter, node: fx.Node) -> None:
    """See Note [Gradients of uneven shards]."""
    values = [writer.values[n] for n in node.all_input_nodes]
    if not is_cp_attention(node) and not any(map(_is_uneven, values)):
        return
    for argument in node.all_input_nodes:
        value = writer.values[argument]
        if (
            isinstance(value, DTensor)
            and value.requires_grad
            and argument not in writer.of_parameters
            and all(p.is_replicate() for p in value.placements)
        ):
            with node.graph.inserting_before(node):
                pinned = writer.call(writer.calls.pin, (argument,), like=node)
            writer.storages[pinned] = writer.storages.get(argument)
            node.replace_input_with(argument, pinned)


def pin_for(
    writer: GraphWriter,
    node: fx.Node,
    problem: str | None,
    of_parts: Mapping[fx.Node, Any],
) -> Any:
    """What brings gradients to the only placements that the backward of a call takes.

    of_parts: of calls with several results; it is the gradients of the parts there.
    """
    if isinstance(problem, OnlyUnsplitGradients):
        return writer.calls.unsplit
    if isinstance(problem, OnlyWholeGradients):
        return writer.calls.pin
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return of_parts.get(node.args[0])
    return None


def _is_uneven(value: Any) -> bool:
    return isinstance(value, DTensor) and any(
        not (p.is_replicate() or p.is_partial())
        and value.shape[p.dim] % value.device_mesh.size(axis)  # type: ignore[attr-defined]
        for axis, p in enumerate(value.placements)
    )
