"""Rules of calls along the tokens: maxima, softmax, products that add up over them.

amax(x, 1)       ->  amax(where(valid, x, -inf), 1)
softmax(x, 1)    ->  softmax(where(valid, x, -inf), 1)
x.mT @ y         ->  where(valid, x, 0).mT @ where(valid, y, 0)
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.graph.sequence_tokens import Tokens
from cpcompile.passes.padding.mends import reduced_dims
from cpcompile.passes.padding.reading import Given, Reading
from cpcompile.passes.padding.tokens import Found


def _extreme(
    reader: Reading,
    node: fx.Node,
    arguments: dict[str, Any],
    given: Given,
    largest: bool,
) -> Found:
    """A reduction that a number which is as low (or as high) as any leaves alone."""
    x, value = arguments["input"], fake_value(arguments["input"])
    dims = reduced_dims(arguments.get("dim"), value.dim())
    if "other" in arguments or given[x].axis.dim not in dims:
        return reader.traced(node, given)
    node.replace_input_with(x, reader.filled(node, x, _bound(value.dtype, not largest)))
    if isinstance(fake_value(node), Tensor):
        return None
    return (None,) * len(pytree.tree_leaves(fake_value(node)))


def _bound(dtype: torch.dtype, high: bool) -> Any:
    """The highest, or the lowest number of a dtype."""
    if dtype == torch.bool:
        return high
    if dtype.is_floating_point:
        return math.inf if high else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if high else limits.min


def largest(
    reader: Reading, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """max, amax, argmax, logsumexp, any."""
    return _extreme(reader, node, arguments, given, largest=True)


def smallest(
    reader: Reading, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """min, amin, argmin, all."""
    return _extreme(reader, node, arguments, given, largest=False)


def softmax(
    reader: Reading, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Over the tokens, of which the padding gets no weight; and its logarithm."""
    x, dim = arguments["input"], arguments.get("dim")
    value = fake_value(x)
    if dim is None or given[x].axis.dim != dim % value.dim():
        return reader.traced(node, given)
    node.replace_input_with(x, reader.filled(node, x, -math.inf))
    return given[x].filled(None)


def product(
    reader: Reading, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """A matrix product that adds up over the tokens of both."""
    x, other = list(arguments.values())[:2]
    if not _adds_up(x, given, -1) or not _adds_up(other, given, -2) or x is other:
        return reader.traced(node, given)
    for each in (x, other):  # of both: 0 * NaN is NaN
        node.replace_input_with(each, reader.filled(node, each, 0))
    return None


def _adds_up(x: fx.Node, given: Given, dim: int) -> bool:
    dims = fake_value(x).dim()
    tokens: Tokens | None = given.get(x)
    return dims > 1 and tokens is not None and tokens.axis.dim == dims + dim
