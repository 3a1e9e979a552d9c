"""Activations that every rank holds in full, though each could have its own tokens.

    x = cat([class_token, patches], 1)    DTensor gathers patches; x is Replicate
      ->
    x = cp_shard(cat([class_token, patches], 1), 1)

Cutting costs no communication, and what follows is computed once, not on every rank.
"""

from __future__ import annotations

import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import is_divided, is_symbol
from cpcompile.passes.graph.sequence_tokens import TokenDim
from cpcompile.passes.propagation.graph_values import GraphValues
from cpcompile.passes.sharding.dim_flows import dim_flows


def lost_dim(known: GraphValues, node: fx.Node) -> TokenDim | None:
    """Along which dimension to split the value of `node`; None to leave it.

    What leads to attention is split along its tokens. So is what comes of a call that
    moves tokens, as a slice behind the last attention does.
    """
    value = known.values[node]
    if (
        node in known.of_parameters
        or not isinstance(value, DTensor)
        or not value.is_floating_point()
        or not all(p.is_replicate() for p in value.placements)
    ):
        return None
    dim = known.sequence_dims.get(node) or _passed_on(known, node, value)
    if dim is None:
        return None
    size = value.shape[dim.dim]
    if is_symbol(size) and not is_divided(size, known.ctx.ranks):
        return None  # shards of symbolic sizes have to be equal
    return dim


def _passed_on(known: GraphValues, node: fx.Node, value: DTensor) -> TokenDim | None:
    """The dimension to which a call moves tokens that are split on the axis."""
    axis, ranks = known.ctx.axis, known.ctx.ranks
    if all(user.op == "output" for user in node.users):
        return None  # it would be gathered again at once
    dims = {
        flow.out
        for flow in dim_flows(node) or ()
        if isinstance(given := known.values[flow.source], DTensor)
        and given.placements[axis] == Shard(flow.dim)
    }
    if len(dims) != 1:
        return None
    (dim,) = dims
    size = value.shape[dim]
    if is_symbol(size) or leaves_ranks_empty(int(size), ranks):
        return None
    return TokenDim(dim)
