"""Pin the placement of gradients that a call shards.

Note [Gradients of uneven shards]
An operator may shard a replicated operand by itself, as attention does, or an addition
to a sharded tensor. The gradient of that operand then comes back sharded, and runs into
the backwards of calls that were tried with a replicated one; where the shards are
uneven, views cannot do that. cp_pin brings such a gradient back to the placement of its
value first.

Note [Gradients of sums]
The gradient of a sum is the same for all of its entries, so that DTensor has it whole
on every rank, and computes with all entries from there on, up to a call that has saved
a sharded value. cp_pin has each rank take its own entries.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch.fx as fx
from torch.distributed.tensor import DTensor

from ...flow.trial_backward import (
    OnlyUnsplitGradients,
    OnlyWholeGradients,
)
from ...graph.calls import canonical_call, spelled
from ...graph.cp_attention import is_cp_attention
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_pin, cp_unreduced, cp_unsplit
from ..normalize.pad_convolutions import CONVOLUTIONS


def inputs_to_pin(known: GraphValues, node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a call that need cp_pin.

    See Note [Gradients of uneven shards].
    """
    inputs = node.all_input_nodes
    if canonical_call(node).name == "sum":
        return [x for x in inputs if _is_summed(known, node, x)]
    uneven = any(_is_uneven(known.values[x]) for x in inputs)
    if not is_cp_attention(node) and not uneven:
        return []
    return [x for x in inputs if x not in known.of_parameters and _is_whole(known, x)]


def inputs_to_combine(known: GraphValues, node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a call that need cp_reduce_partial: sums that must not wait.

    DTensor's rule of convolutions (torch 2.13) takes a rank's summand for the sum, and
    every rank adds the bias.
    """
    if spelled(node) not in _CONVOLUTIONS:
        return []
    values = [(x, known.values.get(x)) for x in node.all_input_nodes]
    return [
        x
        for x, value in values
        if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)
    ]


_CONVOLUTIONS = frozenset(
    (
        *CONVOLUTIONS,
        *(x.replace("conv", "conv_transpose") for x in CONVOLUTIONS),
        "convolution",
    )
)


def pin_for(
    known: GraphValues,
    node: fx.Node,
    problem: str | None,
    of_parts: Mapping[fx.Node, Any],
) -> Any:
    """Return the call that brings gradients to placements a backward takes, or None.

    The backward takes gradients in no other placements.

    of_parts: these calls for nodes with several results; there the gradients are those
        of the parts.
    """
    if isinstance(problem, OnlyUnsplitGradients):
        return cp_unsplit
    if isinstance(problem, OnlyWholeGradients):
        return cp_pin
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return of_parts.get(node.args[0])
    return None


def _is_whole(known: GraphValues, argument: fx.Node) -> bool:
    """Tell whether an argument is replicated and has a gradient.

    One whose gradient is to stay a sum over the ranks is not.
    """
    value = known.values[argument]
    if argument.target is cp_unreduced:
        return False
    if not isinstance(value, DTensor) or not value.requires_grad:
        return False
    return all(p.is_replicate() for p in value.placements)


def _is_summed(known: GraphValues, node: fx.Node, x: fx.Node) -> bool:
    """Tell whether a sum is over entries that ranks share, and has a gradient."""
    value = known.values[x]
    if not isinstance(value, DTensor) or not value.requires_grad:
        return False
    dims = canonical_call(node).arguments.get("dim")
    dims = range(value.ndim) if dims in (None, []) else dims
    summed = {
        d % max(value.ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)
    }
    return any(getattr(p, "dim", None) in summed for p in value.placements)


def _is_uneven(value: Any) -> bool:
    return isinstance(value, DTensor) and any(
        not (p.is_replicate() or p.is_partial())
        and value.shape[p.dim] % value.device_mesh.size(axis)  # type: ignore[attr-defined]
        for axis, p in enumerate(value.placements)
    )
