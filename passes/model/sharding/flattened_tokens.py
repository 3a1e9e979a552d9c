"""Fold calls from flattening (tokens, batch) to bringing tokens back, in uneven parts.

    flat = reshape(x, [130, 32])     # x: [65, 2, 4, 8] S(0) on 2 ranks
    linear = linear(flat, weight)
    y = view(linear, [65, 2, 32])
      ->
    cp_row_parallel = cp_row_parallel(reshape, x, weight)
    y = cp_row_parallel[0]                # [65, 2, 32] S(0)

A rank has 33 tokens of 65, so 66 rows of 130, and DTensor has no placement for these:
its shards of 130 rows are 65. But where every call up to the one that brings the tokens
back does the same with every row, a rank needs no more than the rows of its tokens.
"""

from __future__ import annotations

import logging

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.geometry.lengths import is_symbol

from ...graph.calls import canonical_call
from ...graph.dispatch_calls import NotByRows
from ...graph.nodes import fake_value
from ...placement.decisions import Fold
from ...placement.graph_values import GraphValues
from ..moe.dispatch_region import DispatchRegion
from ..moe.region_call import region_call

log = logging.getLogger(__name__)


def flattened_tokens(known: GraphValues, node: fx.Node) -> Fold | None:
    """Fold the calls from this view on into one on the tokens of each rank, or None."""
    source = canonical_call(node).arguments["input"]
    tokens = _uneven_tokens(known, known.value(source))
    if tokens is None:
        return None
    rows = fake_value(node).shape[0]
    if is_symbol(rows) or rows == tokens or rows % tokens:
        return None
    nodes = list(node.graph.nodes)
    region = DispatchRegion(tokens, known.flows, {})
    try:
        region.grow(node, nodes[nodes.index(node) + 1 :])
        name = getattr(known.callable(node), "__name__", "view").split(".")[0]
        call = region_call(region, name)
    except NotByRows as problem:
        log.debug("the rows from %s on are not those of tokens: %s", node, problem)
        return None
    split = [x for x in region.same_arguments if not _is_whole(known, x)]
    return None if split else Fold(call)


def _uneven_tokens(known: GraphValues, value: object) -> int | None:
    """Return the size of dimension 0 if the axis alone splits it, into uneven parts."""
    if not isinstance(value, DTensor) or not value.ndim or is_symbol(value.shape[0]):
        return None
    axis, placements = known.ctx.axis, list(value.placements)
    is_split = type(placements[axis]) is Shard and placements[axis] == Shard(0)
    placements[axis] = Replicate()
    if not is_split or not all(p.is_replicate() for p in placements):
        return None
    tokens = int(value.shape[0])
    uneven = tokens > 1 and tokens % known.ctx.mesh.size(axis) != 0
    return tokens if uneven else None  # one token would prove nothing of its rows


def _is_whole(known: GraphValues, node: fx.Node) -> bool:
    """Tell whether every rank has all of a value, which may not be computed yet."""
    if node in known.values:
        value = known.values[node]
        if not isinstance(value, DTensor):
            return True
        return all(p.is_replicate() for p in value.placements)
    tensors = (x for x in node.all_input_nodes if isinstance(fake_value(x), Tensor))
    return all(_is_whole(known, x) for x in tensors)
