"""Write what AOTAutograd would take apart, or not see, as calls that it traces.

    cp.ulysses_attention(q, k, v, ...)  ->  cp_whole.ulysses_attention(q, k, v, ...)
    constraint(latent, KEY_SOURCE)      ->  cp_whole.latent_keys(latent, "gather")
    constraint(x, EXCHANGED, 1, 2)      ->  cp_whole.split_along(x, 1, 2)
    constraint(keys, ALL_ROWS, 2)       ->  cp_whole.split_along(keys, 2, ALL)
    mixed_in_parts([q, k, v])           ->  cp_whole.mixer_in_parts([q, k, v])
    out = cp.ring_attention(q, ...)[0]  ->  in_memory_order(out, (0, 2, 1, 3))

The last is where attention on one device has another order in memory than ours: random
numbers are drawn in it, and what joins the heads copies nothing.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from cpcompile.ops.latent_steps import LATENT_KEYS, LatentStep
from cpcompile.ops.shared_mixers import ALL, IN_PARTS, SPLIT_ALONG

from ..graph.context import Context
from ..graph.cp_attention import OPERATORS
from ..graph.effects import written_memory
from ..graph.graph_pass import graph_pass
from ..graph.mixer_calls import mixed_in_parts
from ..graph.nodes import all_nodes, fake_value, insert_call, memory_order, storage
from ..graph.sequence_tokens import Wanted, wanted_of
from ..model.moe.region_call import cp_row_parallel
from .composition_rules import COMPOSITIONS
from .row_programs import run_kept

_CALLS: dict[Any, Any] = {x.call: x.forward for x in COMPOSITIONS}
_CALLS[mixed_in_parts] = IN_PARTS
_STEPS = {
    Wanted.KEY_SOURCE: LatentStep.GATHER,
    Wanted.COMPUTED_KEYS: LatentStep.KEYS,
}


def l1_loss(
    x: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Tensor | None = None,
) -> Tensor:
    """F.l1_loss, which forgets its weight under AOTAutograd (seen in torch 2.13)."""
    if weight is None:
        return F.l1_loss(x, target, size_average, reduce, reduction)
    errors = F.l1_loss(x, target, reduction="none") * weight
    if reduction == "none":
        return errors
    return errors.sum() if reduction == "sum" else errors.sum() / weight.sum()


_CALLS[F.l1_loss] = l1_loss
_CALLS[cp_row_parallel] = run_kept
_ATTENTION = {*OPERATORS.values()}
BY_HAND = "cp_by_hand"  # in what AOTAutograd keeps of a softmax, "custom": its name


@graph_pass(reads=("unmatched_attention", "row_parallel"))
def keep_calls(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite the calls and marks; return how many."""
    count = 0
    for node, _ in (*ctx.findings.unmatched_attention, *ctx.findings.row_parallel):
        node.meta["custom"] = {**node.meta.get("custom", {}), BY_HAND: node.name}
    written = written_memory(graph)
    for node in all_nodes(graph):
        wanted = wanted_of(node)
        if node.target in _ATTENTION:
            _give_order(node, written)
        if node.target in _CALLS:
            node.target = _CALLS[node.target]
        elif wanted in _STEPS:
            node.target, node.args = LATENT_KEYS, (node.args[0], _STEPS[wanted].value)
        elif wanted is Wanted.EXCHANGED:
            x, _, source, target = node.args
            node.target = SPLIT_ALONG
            node.args = (x, source, ALL if target is None else target)
        elif wanted is Wanted.ALL_ROWS:
            x, _, dim = node.args
            node.target, node.args = SPLIT_ALONG, (x, dim, ALL)
        else:
            continue
        count += 1
    return count


def _give_order(node: fx.Node, written: set[int | None]) -> None:
    """Have those who read attention find it in the order of memory of one device.

    And a copy of it where they write to it: the backward reads it.
    """
    for out in [x for x in node.users if x.args == (node, 0)]:
        order, is_written = memory_order(fake_value(out)), storage(out) in written
        if order is not None:
            _insert_behind(out, in_memory_order, order)
        if is_written:
            _insert_behind(out, torch.clone)


def _insert_behind(node: fx.Node, call: Callable[..., Any], *more: Any) -> None:
    """Have all readers of a value read what a call makes of it."""
    with node.graph.inserting_after(node):
        args, value = (node, *more), fake_value(node)
        new = insert_call(node.graph, call, args, like=node, value=value)
    node.replace_all_uses_with(new, functools.partial(operator.is_not, new))


def in_memory_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return `x`, copied if its dimensions do not lie in this order."""
    back = [order.index(dim) for dim in range(len(order))]
    return x.permute(order).contiguous().permute(back)
