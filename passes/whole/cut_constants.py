"""Calls that keep tokens apart, and what such a call cuts itself.

Note [Calls that keep tokens apart]
A call without a message, whose operands and results are cut along the same tokens, has
never seen a token of another rank. Its rule says so for any number of ranks, up to one
for each token: no token meets another in it. What it cuts itself from a value that is
whole lies in the order of the ranks, and has to be laid out before.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Partial

from ..graph.sequence_tokens import TokenDim
from .call_rules import adds_up, cuts_in_order
from .local_calls import LocalCall
from .token_order import TokenOrder

aten = torch.ops.aten
_CUTS = (aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor)


def constants(
    call: LocalCall, order: TokenOrder, target: Any
) -> dict[int, TokenDim] | None:
    """Return what a call cuts itself, by operand; None if tokens may meet in it.

    See Note [Calls that keep tokens apart].

    target: of the call. What cuts in an order has nothing of the kind.
    """
    if call.brings_together(order.cp_axis, but_for_sums=adds_up(target)):
        return None
    if any(_is_looked_up(x) for x in call.results):
        return None
    lengths = set()
    for x in (*call.operands, *call.results):
        if is_cut(x, order):
            tokens = order.tokens_of(x)
            lengths.add(None if tokens is None else tokens[0])
    if len(lengths) != 1 or None in lengths:
        return None
    found: dict[int, TokenDim] = {}
    if cuts_in_order(target):
        return found
    (length,) = lengths
    graph = call.module.graph
    inputs = graph.find_nodes(op="placeholder")[len(call.symbols) :]
    for node in graph.nodes:
        if node.target is aten.index_put.default and _writes_tokens(node, call, order):
            return None
        if node.target not in _CUTS:
            continue
        source, dim = node.args[0], _dim_of(node)
        place = inputs.index(source) if source in inputs else None
        operand = None if place is None else call.operands[place]
        if place is not None and is_cut(operand, order):
            tokens = order.tokens_of(operand)
            if tokens is not None and tokens[1].dim == dim:
                return None
        elif not source.meta["val"].shape[dim] % length:
            if place is None or found.get(place, TokenDim(dim)) != TokenDim(dim):
                return None
            found[place] = TokenDim(dim)
    return found


def _is_looked_up(x: Any) -> bool:
    """Tell whether ranks have what their own entries of a table say."""
    placements = x.placements if isinstance(x, DTensor) else ()
    return any(p.is_partial() and type(p) is not Partial for p in placements)


def is_cut(x: Any, order: TokenOrder) -> bool:
    """Tell whether the ranks of the sequence have parts of a value."""
    return isinstance(x, DTensor) and hasattr(x.placements[order.cp_axis.axis], "dim")


def _writes_tokens(write: fx.Node, call: LocalCall, order: TokenOrder) -> bool:
    """Tell whether a rank writes to places among its tokens, which are no others."""
    indices: Any = write.args[1]
    written = {dim for dim, at in enumerate(indices) if at is not None}
    cut = (order.tokens_of(x) for x in call.operands if is_cut(x, order))
    return any(x is not None and x[1].dim in written for x in cut)


def _dim_of(cut: fx.Node) -> int:
    source, *how = cut.args
    place = 0 if cut.target is aten.slice.Tensor else 1
    dim: Any = how[place] if len(how) > place else 0
    return int(dim % source.meta["val"].ndim)  # type: ignore[union-attr]
