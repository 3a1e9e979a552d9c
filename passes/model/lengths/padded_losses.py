"""Rules of losses, in which the padding counts nothing.

cross_entropy(logits, labels)  ->  cross_entropy(logits, where(valid, labels, -100))
mse_loss(x, y)                 ->  div(sum(where(valid, mse_loss(x, y, "none"), 0)),
                                       real)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ...graph.loss_calls import MEAN_BY_WEIGHT, LossCall, loss_call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from .padded_tokens import Found, Unproved
from .rule_context import Given, RuleContext


def class_loss(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Give the labels in the padding the number that the loss ignores."""
    loss = _loss_of(node)
    scores, labels = loss.input, loss.target
    if {scores, labels} != given.keys() or scores is labels:
        raise Unproved("logits and labels are not both of the tokens")
    value = fake_value(labels)
    if value.is_floating_point() or fake_value(scores).dim() != value.dim() + 1:
        raise Unproved("labels are no numbers of classes")
    one, other = given[scores], given[labels]
    dim = other.axis.dim + (other.axis.dim > 0)  # classes are dimension 1
    if one.axis != other.axis.moved(dim) or one.extra != other.extra:
        raise Unproved("logits and labels are of different tokens")
    hidden = reader.filled(node, labels, loss.options["ignore_index"])
    node.replace_input_with(labels, hidden)
    return other.filled(0) if loss.reduction == "none" else None


def elementwise_loss(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Compute the loss of every element, and add these up without the padding."""
    loss = _loss_of(node)
    if loss.reduction == "none":
        return reader.traced(node, given)
    named = {k: x for k, x in loss.options.items() if x is not None}
    elements = reader.masker.call(
        node, loss.function, loss.input, loss.target, reduction="none", **named
    )
    tokens = reader.traced(elements, given)
    reader.sizes.check(fake_value(elements), tokens)
    assert isinstance(tokens, Tokens)
    reader.found[elements] = tokens
    hidden = reader.filled(node, elements, 0)
    reader.replaced(node, _added_up(reader, node, loss, hidden, tokens, given))
    return None


def _added_up(
    reader: RuleContext,
    node: fx.Node,
    loss: LossCall,
    hidden: fx.Node,
    tokens: Tokens,
    given: Given,
) -> fx.Node:
    masker, shape = reader.masker, fake_value(hidden).shape
    weight = loss.options.get("weight")
    if loss.reduction == "mean" and not (
        loss.function in MEAN_BY_WEIGHT and isinstance(weight, fx.Node)
    ):
        return masker.averaged(node, hidden, tokens, list(range(len(shape))), {}, None)
    total = masker.call(node, torch.sum, hidden)
    if loss.reduction == "mean":
        if weight not in given:
            raise Unproved("its weights are not those of the tokens")
        counted = reader.filled(node, weight, 0)
        return masker.call(
            node, torch.div, total, masker.call(node, torch.sum, counted)
        )
    if loss.reduction == "batchmean" and tokens.axis.dim == 0:
        count = masker.count(node, tokens, tokens.axis.outer * tokens.axis.inner)
        return masker.call(node, torch.div, total, count)
    if loss.reduction == "batchmean":
        return masker.call(node, torch.div, total, int(shape[0]))
    return total


def _loss_of(node: fx.Node) -> LossCall:
    loss = loss_call(node)
    if loss is None:
        raise Unproved("it does not say in a known way how it adds up")
    return loss
