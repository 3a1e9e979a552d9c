"""Rules of calls that add up, or compare, over the tokens, and of losses.

A rule returns where the tokens of the result are, after it has hidden the padding from
the call. It raises Unproved where it cannot.

    sum(x, 1)        ->  sum(where(valid, x, 0), 1)
    amax(x, 1)       ->  amax(where(valid, x, -inf), 1)
    softmax(x, 1)    ->  softmax(where(valid, x, -inf), 1)
    x.mT @ y         ->  where(valid, x, 0).mT @ where(valid, y, 0)
    mse_loss(x, y)   ->  div(sum(where(valid, mse_loss(x, y, "none"), 0)), real)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.torch_private import pytree

from ...graph.calls import canonical_call
from ...graph.loss_calls import MEAN_BY_WEIGHT, LossCall, loss_call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from ..moe.token_program import row_program_of
from .padded_graph import PaddedGraph
from .sizes import Found, Unproved

# Reductions, with the number that has no effect on the result.
NEUTRAL = {
    **dict.fromkeys(("sum", "mean", "any", "cumsum"), 0.0),
    **dict.fromkeys(("prod", "all"), 1.0),
    **dict.fromkeys(("max", "amax", "argmax", "logsumexp"), -math.inf),
    **dict.fromkeys(("softmax", "log_softmax"), -math.inf),
    **dict.fromkeys(("min", "amin", "argmin"), math.inf),
}
_KEEP_TOKENS = ("softmax", "log_softmax", "cumsum")


def _number_of(dtype: torch.dtype, number: float) -> Any:
    """Return a number as one of a dtype, whose largest integer is its infinity."""
    if dtype == torch.bool:
        return number > 0
    if dtype.is_floating_point or dtype.is_complex:
        return number
    limits = torch.iinfo(dtype)
    return int(min(max(number, limits.min), limits.max))


def reduced(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Fill the padding of a reduction with a number that has no effect."""
    x, dim, call = arguments["input"], arguments.get("dim"), canonical_call(node)
    value, tokens = fake_value(x), graph.tokens(x)
    if dim is None or dim == []:
        dims = [] if call.name in _KEEP_TOKENS else list(range(value.dim()))
    else:
        dims = [
            d % max(value.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)
        ]
    if "other" in arguments or tokens is None or tokens.axis.dim not in dims:
        return graph.node_by_token(node)
    several = not isinstance(fake_value(node), Tensor)
    finds_places = call.name.startswith("arg") or several
    if finds_places and not (tokens.is_whole and dim is not None):
        raise Unproved("where it finds something is counted over more than the tokens")
    if call.name == "mean":
        hidden, keepdim = graph.hidden(node, x, 0), bool(arguments.get("keepdim"))
        mean = graph.average(node, hidden, dims, keepdim, arguments.get("dtype"))
        graph.replace(node, mean)
        return None
    graph.hide(node, x, _number_of(value.dtype, NEUTRAL[call.name]))
    if call.name in _KEEP_TOKENS:
        return tokens
    return (None,) * len(pytree.tree_leaves(fake_value(node))) if several else None


# Products, which are linear in each operand.
PRODUCTS = ("matmul", "bmm", "mm")


def added_up(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Hide the padding from a product, or a call on rows, that adds up over the tokens.

    All operands of a product get 0 there: 0 * NaN is NaN.
    """
    flow, rows = graph.flow_of(node), row_program_of(node)
    if flow is None or not flow.is_local or not all(x.is_sum for x in flow.tensors):
        return graph.node_by_token(node)
    numbers: list[Any] = [(x, 0) for x in node.all_input_nodes]
    if rows is not None:
        if rows.not_counted is None:
            raise Unproved("it sums or counts over the tokens")
        numbers = list(zip(node.args[1:], rows.not_counted, strict=True))
    for x, number in numbers:
        if number is not None and graph.tokens(x) is not None:
            graph.hide(node, x, number)
    return None if flow.spec.is_leaf() else (None,) * len(flow.results)


def class_loss(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Give the labels in the padding the number that the loss ignores."""
    loss = _loss_of(node)
    one, other = graph.tokens(loss.input), graph.tokens(loss.target)
    if one is None or other is None or graph.tokens(loss.options.get("weight")):
        raise Unproved("logits and labels are not both of the tokens")
    value = fake_value(loss.target)
    if value.is_floating_point() or fake_value(loss.input).dim() != value.dim() + 1:
        raise Unproved("labels are no numbers of classes")
    dim = other.axis.dim + (other.axis.dim > 0)  # classes are dimension 1
    if one != Tokens(other.axis.moved(dim), other.extra):
        raise Unproved("logits and labels are of different tokens")
    graph.hide(node, loss.target, loss.options["ignore_index"])
    return other if loss.reduction == "none" else None


def elementwise_loss(
    graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]
) -> Found:
    """Compute the loss of every element, and add these up without the padding."""
    loss = _loss_of(node)
    named = {k: x for k, x in loss.options.items() if x is not None}
    weights = [x for x in named.values() if isinstance(x, fx.Node)]
    tokens = graph.by_token(_all_elements, loss.input, loss.target, *weights)
    if loss.reduction == "none":
        return tokens
    elements = graph.call(
        node, loss.function, loss.input, loss.target, reduction="none", **named
    )
    graph.sizes.check(fake_value(elements), tokens)
    graph.found[elements] = tokens
    graph.replace(node, _added_up(graph, node, loss, elements))
    return None


def _all_elements(*operands: Tensor) -> Tensor:
    """Combine every element of operands, as losses with one number for each do."""
    return functools.reduce(torch.add, operands)


def _added_up(
    graph: PaddedGraph, node: fx.Node, loss: LossCall, elements: fx.Node
) -> fx.Node:
    weight, tokens = loss.options.get("weight"), graph.tokens(elements)
    hidden, shape = graph.hidden(node, elements, 0), fake_value(elements).shape
    by_weight = loss.function in MEAN_BY_WEIGHT and isinstance(weight, fx.Node)
    if loss.reduction == "mean" and not by_weight:
        return graph.average(node, hidden, list(range(len(shape))))
    total = graph.call(node, torch.sum, hidden)
    if loss.reduction == "mean":
        if weight is None or graph.tokens(weight) is None:
            raise Unproved("its weights are not those of the tokens")
        counted = graph.call(node, torch.sum, graph.hidden(node, weight, 0))
        return graph.call(node, torch.div, total, counted)
    if loss.reduction == "batchmean":
        assert tokens is not None, "elements have the tokens of the operands"
        of_batch = graph.count(node, tokens) if tokens.axis.dim == 0 else int(shape[0])
        return graph.call(node, torch.div, total, of_batch)
    return total


def _loss_of(node: fx.Node) -> LossCall:
    loss = loss_call(node)
    if loss is None:
        raise Unproved("it does not say in a known way how it adds up")
    return loss
