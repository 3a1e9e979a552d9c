"""Pins the placement of gradients that a call shards.

Note [Gradients of uneven shards]
An operator may shard a replicated operand by itself, as attention does, or an addition
to a sharded tensor. The gradient of that operand then comes back sharded, and runs into
the backwards of calls that were tried with a replicated one; where the shards are
uneven, views cannot do that. cp_pin brings such a gradient back to the placement of its
value first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.passes.insert_attention import is_cp_attention

if TYPE_CHECKING:
    from cpcompile.passes.shard_graph import Sharder


def pin_gradients(sharder: Sharder, node: fx.Node) -> None:
    """See Note [Gradients of uneven shards]."""
    values = [sharder.values[n] for n in node.all_input_nodes]
    if not is_cp_attention(node) and not any(map(_is_uneven, values)):
        return
    for argument in node.all_input_nodes:
        value = sharder.values[argument]
        if (
            isinstance(value, DTensor)
            and value.requires_grad
            and argument not in sharder.of_parameters
            and all(p.is_replicate() for p in value.placements)
        ):
            with node.graph.inserting_before(node):
                pinned = sharder.call(sharder.calls.pin, (argument,), like=node)
            sharder.storages[pinned] = sharder.storages.get(argument)
            node.replace_input_with(argument, pinned)


def _is_uneven(value: Any) -> bool:
    return isinstance(value, DTensor) and any(
        not (p.is_replicate() or p.is_partial())
        and value.shape[p.dim] % value.device_mesh.size(axis)  # type: ignore[attr-defined]
        for axis, p in enumerate(value.placements)
    )
