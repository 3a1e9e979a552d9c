"""Rules of calls along the tokens: maxima, softmax, products that add up over them.

amax(x, 1)       ->  amax(where(valid, x, -inf), 1)
softmax(x, 1)    ->  softmax(where(valid, x, -inf), 1)
x.mT @ y         ->  where(valid, x, 0).mT @ where(valid, y, 0)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from ...graph.calls import canonical_call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from .masking import reduced_dims
from .padded_tokens import Found, Unproved
from .rule_context import Given, Rule, RuleContext


def _without_effect(
    reader: RuleContext,
    node: fx.Node,
    arguments: dict[str, Any],
    given: Given,
    number: Callable[[torch.dtype], Any],
) -> Found:
    """Fill the padding of a reduction with a number that has no effect on its result.

    number: gives that number for a dtype.
    """
    x, value = arguments["input"], fake_value(arguments["input"])
    dims = reduced_dims(arguments.get("dim"), value.dim())
    if "other" in arguments or given[x].axis.dim not in dims:
        return reader.traced(node, given)
    alone = given[x].is_whole and arguments.get("dim") is not None
    if _gives_places(node) and not alone:
        raise Unproved("where it finds something is counted over more than the tokens")
    node.replace_input_with(x, reader.filled(node, x, number(value.dtype)))
    if isinstance(fake_value(node), Tensor):
        return None
    return (None,) * len(pytree.tree_leaves(fake_value(node)))


def _gives_places(node: fx.Node) -> bool:
    """Tell whether a reduction says where in its dimension it found something."""
    name = canonical_call(node).name
    return name.startswith("arg") or not isinstance(fake_value(node), Tensor)


def _lowest(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _reduction(number: Callable[[torch.dtype], Any]) -> Rule:
    return functools.partial(_without_effect, number=number)


largest = _reduction(_lowest)  # max, amax, argmax, logsumexp
smallest = _reduction(_highest)  # min, amin, argmin
any_of = _reduction(lambda dtype: False if dtype == torch.bool else 0)
all_of = _reduction(lambda dtype: True if dtype == torch.bool else 1)


def softmax(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Give the padding no weight in a softmax over the tokens, or in its logarithm."""
    x, dim = arguments["input"], arguments.get("dim")
    value = fake_value(x)
    if dim is None or given[x].axis.dim != dim % value.dim():
        return reader.traced(node, given)
    node.replace_input_with(x, reader.filled(node, x, -math.inf))
    return given[x].filled(None)


def product(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Hide the padding from a matrix product that adds up over the tokens of both."""
    x, other = list(arguments.values())[:2]
    if not _adds_up(x, given, -1) or not _adds_up(other, given, -2) or x is other:
        return reader.traced(node, given)
    one, two = given[x], given[other]
    if (one.axis.moved(0), one.extra) != (two.axis.moved(0), two.extra):
        raise Unproved("tokens meet others in an order that depends on their number")
    for each in (x, other):  # of both: 0 * NaN is NaN
        node.replace_input_with(each, reader.filled(node, each, 0))
    return None


def _adds_up(x: fx.Node, given: Given, dim: int) -> bool:
    dims = fake_value(x).dim()
    tokens: Tokens | None = given.get(x)
    return dims > 1 and tokens is not None and tokens.axis.dim == dims + dim
