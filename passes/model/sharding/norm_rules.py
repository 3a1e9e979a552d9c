"""Normalise positions that ranks share out by sums, where DTensor gathers all of them.

x: [B, C, 32, 32] S(2) on 2 ranks
batch_norm(x, running_mean, running_var, weight, bias, training=True)
  ->
cp_channel_norm(x, (0, 2, 3), ..)     two messages of [C] numbers
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.fx as fx
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.channel_norms import cp_channel_norm, cp_group_norm
from ...placement.decisions import Replace
from ...placement.graph_values import GraphValues


def batch_norm(known: GraphValues, node: fx.Node) -> Replace | None:
    """Decide on a normalisation over the batch and all positions."""
    given = canonical_call(node).arguments
    own = (0, *range(2, fake_value(node).ndim))
    return _by_sums(known, node, own if given["training"] else ())


def instance_norm(known: GraphValues, node: fx.Node) -> Replace | None:
    """Decide on a normalisation over all positions of each sample."""
    given = canonical_call(node).arguments
    own = range(2, fake_value(node).ndim)
    return _by_sums(known, node, own if given["use_input_stats"] else ())


def group_norm(known: GraphValues, node: fx.Node) -> Replace | None:
    """Decide on a normalisation over groups of channels, and all positions."""
    given = canonical_call(node).arguments
    x, groups = given["input"], given["num_groups"]
    scale = (given["weight"], given["bias"])
    if not _is_split(known, x, 2) or not all(_is_whole(known, y) for y in scale):
        return None  # DTensor shares out samples
    args = (x, groups, *scale, given["eps"])
    return Replace(NewCall(cp_group_norm, args))


def _by_sums(known: GraphValues, node: fx.Node, dims: Sequence[int]) -> Replace | None:
    given = canonical_call(node).arguments
    x, running = given["input"], (given["running_mean"], given["running_var"])
    is_kept = None not in running
    scale = (given["weight"], given["bias"])
    if not _is_split(known, x) or not (dims or is_kept):
        return None
    if not all(_is_whole(known, y) for y in scale):
        return None
    if dims and all(expected(fake_value(x).shape[dim]) == 1 for dim in dims):
        return None  # torch refuses a variance of one value
    kept = running if is_kept else None
    args = (x, tuple(dims), kept, given["momentum"], *scale, given["eps"])
    return Replace(NewCall(cp_channel_norm, args))


def _is_split(known: GraphValues, x: fx.Node, first: int = 0) -> bool:
    """Tell whether ranks share out entries along a dimension from `first` on.

    Not along channels, each of which has a mean of its own.
    """
    value = known.value(x)
    placements = value.placements if isinstance(value, DTensor) else ()
    split = [p for p in placements if not p.is_replicate()]
    dims = [getattr(p, "dim", 1) for p in split]  # 1 for a sum that waits
    return 1 not in dims and any(dim >= first for dim in dims)


def _is_whole(known: GraphValues, x: fx.Node | None) -> bool:
    """Tell whether every rank has a parameter, and gets a summand of its gradient."""
    if x is None:
        return True
    value = known.value(x)
    if isinstance(value, DTensor):
        return all(p.is_replicate() for p in value.placements)
    return not value.requires_grad


RULES = {
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "group_norm": group_norm,
}
