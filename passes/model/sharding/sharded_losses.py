"""Compute losses of sharded values as sums over a rank's elements and a count of all.

mse_loss = mse_loss(x, l_target_)    # x: [2, 15, 8] S(1)
  ->
cp_place = cp_place(l_target_, (S(1),))
cp_mse_loss = cp_mse_loss(x, cp_place, None, 'mean')    # [] P(sum)
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from cpcompile.geometry.lengths import is_same

from ...graph.constant_arguments import Callee
from ...graph.loss_calls import LossCall, loss_call
from ...graph.memory_order import memory_order
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.decisions import Replace
from ...placement.global_losses import (
    broadcast_placements,
    cp_loss,
    target_placements,
)
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_place


def class_loss(known: GraphValues, node: fx.Node) -> Replace | None:
    """Replace a loss of classes: a mean is over all tokens, not of the ranks' means."""
    loss = loss_call(node)
    if loss is None:
        return None
    scores, target = known.value(loss.input), known.value(loss.target)
    weight = known.value(loss.options.get("weight"))
    if not isinstance(scores, DTensor) or isinstance(weight, DTensor):
        return None
    class_dim = 1 if scores.ndim > 1 else 0
    dims = {getattr(p, "dim", None) for p in scores.placements}
    if class_dim in dims or any(p.is_partial() for p in scores.placements):
        return None
    placements = target_placements(scores, target)
    plain = not isinstance(target, DTensor)
    whole = loss.target if plain and loss.reduction == "mean" else None
    new_target = _placed(known, loss.target, placements)
    return _global_loss(known, node, loss, loss.input, new_target, whole, loss.options)


def elementwise_loss(known: GraphValues, node: fx.Node) -> Replace | None:
    """Replace an elementwise loss: a rank's own sum is divided by the count of all.

    See `class_loss`.
    """
    loss = loss_call(node)
    if loss is None:
        return None
    scores, target = known.value((loss.input, loss.target))
    like = next((x for x in (scores, target) if _is_split(x)), None)
    if like is None or any(p.is_partial() for p in like.placements):
        return None
    sizes = zip(scores.shape, target.shape, strict=False)
    if scores.ndim != target.ndim or not all(is_same(*pair) for pair in sizes):
        return None  # the result has the elements of neither
    options = dict(loss.options)
    for name, option in options.items():
        value = known.value(option)
        if not isinstance(value, Tensor):
            continue
        placements = broadcast_placements(like, value)
        if placements is None:
            return None
        options[name] = _placed(known, option, placements)
    new_scores = _placed(known, loss.input, like.placements)
    new_target = _placed(known, loss.target, like.placements)
    return _global_loss(known, node, loss, new_scores, new_target, None, options)


def _is_split(value: object) -> bool:
    if not isinstance(value, DTensor):
        return False
    return any(hasattr(p, "dim") for p in value.placements)


def _placed(known: GraphValues, x: fx.Node, placements: tuple[Placement, ...]) -> Any:
    """Return a value in these placements, which it may have already."""
    value = known.value(x)
    if isinstance(value, DTensor) and value.placements == placements:
        return x
    return NewCall(cp_place, (x, known.cp_axis, placements))


def _global_loss(
    known: GraphValues,
    node: fx.Node,
    loss: LossCall,
    scores: Any,
    target: Any,
    whole: fx.Node | None,
    options: dict[str, Any],
) -> Replace:
    options = {name: x for name, x in options.items() if x is not None}
    function = Callee(loss.function)
    args: tuple[Any, ...] = (function, scores, target, whole, loss.reduction)
    order = memory_order(fake_value(node)) if loss.reduction == "none" else None
    if order is not None:
        args = (*args, order)
    return Replace(NewCall(cp_loss, args, options))
