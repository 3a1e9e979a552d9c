"""Decide on look-ups in tables: embeddings, and entries that are taken by number."""

from __future__ import annotations

import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cpcompile.errors import RewriteError

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall, with_inputs
from ...graph.nodes import where
from ...placement.decisions import Decision, FallBack, Propagate, RewriteCall
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_renorm, cp_shard, cp_take


def embedding(known: GraphValues, node: fx.Node) -> Decision | None:
    """Shard the ids of an embedding, so that looked-up vectors are sharded.

    Token and position ids are plain up to here.

    Raises: RewriteError for a sparse gradient, which no collective adds up.
    """
    arguments = canonical_call(node).arguments
    ids, weight = arguments["input"], arguments["weight"]
    trained = known.ctx.backward and known.value(weight).requires_grad
    if arguments["sparse"] and trained:
        raise RewriteError(
            f"embedding at {where(node)} has sparse=True, and ranks cannot add up "
            "sparse gradients; needed sparse=False, with an optimizer that takes dense "
            "gradients"
        )
    if arguments.get("max_norm") is not None:
        norms = (ids, arguments["max_norm"], arguments["norm_type"])
        written = NewCall(cp_renorm, (weight, *norms))
        rest = (arguments["padding_idx"], None, 2.0, arguments["scale_grad_by_freq"])
        return RewriteCall(NewCall(F.embedding, (ids, written, *rest)))
    if arguments["scale_grad_by_freq"] and trained:
        return FallBack("its gradient is divided by how often a word is in all tokens")
    sharded: fx.Node | NewCall | None = known.sharded_ids.get(ids)
    dim = known.sequence_dims.get(ids)
    if isinstance(known.value(ids), DTensor):
        return None
    if sharded is None:
        if dim is None or dim.outer > 1:
            return None  # DTensor looks up a whole batch of flattened ids at once
        sharded = NewCall(cp_shard, (ids, known.cp_axis, dim.dim))
    return Propagate(with_inputs(node, lambda x: sharded if x is ids else x))


def take(known: GraphValues, node: fx.Node) -> Decision | None:
    """Take entries of gathered values by an index of one dimension.

    Inductor's take asks for the value of an index without dimensions.
    """
    given = canonical_call(node).arguments
    if not isinstance(known.value(given["input"]), DTensor):
        return None
    entries = NewCall(cp_take, (given["input"], given["index"]))
    return FallBack("DTensor has no sharding rule for take", entries)


RULES = {"embedding": embedding, "take": take}
