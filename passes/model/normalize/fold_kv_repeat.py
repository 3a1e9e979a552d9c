"""Fold keys and values that a model repeats for its query heads.

    k [B, G, S, D] -> [:, :, None] -> expand -> reshape [B, H, S, D] -> attention
      ->
    k [B, G, S, D] -> attention with enable_gqa

Without it each rank would send H / G copies of every key. A repetition is folded where
query head h is proved to read key head h // (H / G), of k and of v alike. A chain in
which the copies are the outer factor, `repeat(1, n, 1, 1)` of several heads, has
another order, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.fx as fx
from torch import Tensor

from ...flow.view_chain import Dims, Link, follow, is_copies
from ...graph.calls import set_argument
from ...graph.context import AttentionCall, Context
from ...graph.effects import is_in_place, view_of, written_by
from ...graph.graph_pass import graph_pass
from ...graph.nodes import expected_shape, fake_value, insert_call, storage

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadMoves:
    """Moves of dimensions that unrepeat a tensor; each of the three may be empty."""

    squeezed: tuple[int, ...]
    order: tuple[int, ...]
    unsqueezed: tuple[int, ...]

    @property
    def calls(self) -> int:
        """Number of calls that the moves take."""
        permutes = self.order != tuple(range(len(self.order)))
        return bool(self.squeezed) + permutes + len(self.unsqueezed)


@dataclass(frozen=True)
class KVRepeat:
    """An operand whose heads are repeated: the chain, and where it is unrepeated."""

    times: int
    links: tuple[Link, ...]
    source: Link
    moves: HeadMoves


@graph_pass(writes=("calls",))
def fold_kv_repeat(graph: fx.Graph, ctx: Context) -> int:
    """Fold the repeated key heads of attention calls; return how many calls changed."""
    before = ctx.findings.calls
    ctx.findings.calls = [_fold(call) for call in before]
    return sum(
        old is not new for old, new in zip(before, ctx.findings.calls, strict=True)
    )


def _fold(call: AttentionCall) -> AttentionCall:
    if call.unsupported is not None or call.already_local is not None:
        return call
    repeats = [_repeat(x, call.node) for x in (call.k, call.v)]
    k, v = repeats
    if k is None or v is None or k.times != v.times:
        if k is not None or v is not None:
            log.debug("attention at %s: k and v are not repeated alike", call.path)
        return call
    with call.node.graph.inserting_before(call.node):
        folded = [_unrepeated(x, call.node) for x in (k, v)]
    set_argument(call.node, "key", folded[0])
    set_argument(call.node, "value", folded[1])
    set_argument(call.node, "enable_gqa", True)
    if call.lse is not None:
        call.lse.args = (*call.lse.args[:2], folded[0])
        call.lse.kwargs = {**call.lse.kwargs, "enable_gqa": True}
    for repeat in (k, v):
        _erase_unread(repeat)
    log.debug("attention at %s: %d copies of the keys folded", call.path, k.times)
    k_shape = expected_shape(fake_value(folded[0]))
    return replace(call, k=folded[0], v=folded[1], k_shape=k_shape)


def _repeat(operand: fx.Node, call: fx.Node) -> KVRepeat | None:
    """Return how an operand repeats its heads; None if it does not.

    None also if the heads are not in the order that grouped heads have.
    """
    links = follow(operand)
    dims = links[-1].dims
    if len(dims) != 4 or not dims[1] or not is_copies(dims[1][-1]):
        return None
    *heads, copies = dims[1]
    folded = (dims[0], tuple(heads), *dims[2:])
    ways = [(_moves(link.dims, folded), link) for link in links]
    possible = [(moves, link) for moves, link in ways if moves is not None]
    if not possible or _is_written(links, call):
        return None
    moves, source = min(reversed(possible), key=lambda way: way[0].calls)
    return KVRepeat(copies.extent, tuple(links), source, moves)


def _moves(source: Dims, target: Dims) -> HeadMoves | None:
    """Return how dimensions become others by permuting; None if they do not.

    Dimensions of size 1 come and go.
    """
    unmatched = list(range(len(source)))
    matched: list[int | None] = []
    for dim in target:
        position = next((i for i in unmatched if source[i] == dim), None)
        if position is None and dim:
            return None
        if position is not None:
            unmatched.remove(position)
        matched.append(position)
    if any(source[i] for i in unmatched):
        return None
    positions = [i for i in matched if i is not None]
    order = tuple(sorted(positions).index(i) for i in positions)
    unsqueezed = tuple(i for i, place in enumerate(matched) if place is None)
    return HeadMoves(tuple(unmatched), order, unsqueezed)


def _unrepeated(repeat: KVRepeat, call: fx.Node) -> fx.Node:
    """Make the operand [B, G, S, D] from the source of the chain."""
    node, moves = repeat.source.node, repeat.moves

    def insert(target: Callable[..., Tensor], argument: object) -> fx.Node:
        value = target(fake_value(node), argument)
        args = (node, argument)
        return insert_call(node.graph, target, args, like=call, value=value)

    if moves.squeezed:
        node = insert(torch.squeeze, moves.squeezed)
    if moves.order != tuple(range(len(moves.order))):
        node = insert(torch.permute, moves.order)
    for dim in moves.unsqueezed:
        node = insert(torch.unsqueeze, dim)
    return node


def _is_written(links: list[Link], call: fx.Node) -> bool:
    """Tell whether a chain's elements may change between its beginning and the call.

    Copies are made on the way, so that the source may not be what the copy was.
    """
    chain = [link.node for link in links]
    memory = {storage(node) for node in chain} | {_base(node) for node in chain}
    node = chain[1]
    while node is not call:
        node = node.next
        if node.op not in ("call_function", "call_method") or not is_in_place(node):
            continue
        for written in written_by(node):
            if storage(written) in memory or _base(written) in memory:
                return True
    return False


def _base(node: fx.Node) -> fx.Node:
    """Return the node whose memory this one may be a view of."""
    while (source := view_of(node)) is not None:
        node = source
    return node


def _erase_unread(repeat: KVRepeat) -> None:
    for link in reversed(repeat.links[1:]):
        if link.node.users or link.node is repeat.source.node:
            return
        link.node.graph.erase_node(link.node)
