"""Rules of calls in which tokens meet, or whose arguments say where they go.

A rule returns where the tokens of the result are, after it has hidden the padding from
the call. It raises Unproved where it cannot.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor

from ...graph.loss_calls import ELEMENTWISE, OF_CLASSES
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from ..moe.token_program import row_program_of
from .convolution_rule import convolved
from .creation_rules import sizes_in
from .indexing import FromTheEnd, indexed
from .masking import reduced_dims
from .padded_losses import class_loss, elementwise_loss
from .padded_tokens import Found, Unproved
from .padded_writes import check_unwritten
from .reduction_rules import (
    all_of,
    any_of,
    largest,
    product,
    smallest,
    softmax,
)
from .rule_context import Given, Rule, RuleContext


def _sum(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    x = arguments["input"]
    dims = reduced_dims(arguments.get("dim"), fake_value(x).dim())
    if given[x].axis.dim not in dims:
        return reader.traced(node, given)
    hidden = reader.filled(node, x, 0)
    reader.replaced(node, reader.masker.reduced(node, hidden, given[x].filled(0)))
    return None


def _getitem(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    x, index = arguments["input"], sizes_in(arguments["index"])
    parts = index if isinstance(index, tuple | list) else (index,)
    if any(isinstance(i, fx.Node | Tensor) for i in parts):
        if x in given:
            raise Unproved("tokens are picked by values")
        return reader.traced(node, given)
    found = indexed(node, index, given[x], reader.sizes.extra_of)
    if not isinstance(found, FromTheEnd):
        return found
    check_unwritten(reader, x)
    read = reader.masker.tail if found.all_behind else reader.masker.last
    reader.replaced(node, read(node, x, given[x], found.back))
    return None


def _select(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    x, at = arguments["input"], arguments["index"]
    if arguments["dim"] % fake_value(x).dim() != given[x].axis.dim:
        return reader.traced(node, given)
    if not isinstance(at, int):
        raise Unproved("a token is picked by the number of tokens")
    if at < 0:
        check_unwritten(reader, x)
        reader.replaced(node, reader.masker.last(node, x, given[x], -at))
    return None


def _pad(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Find the tokens that a pad shifts.

    The padding after the last token has to be what is put there.
    """
    x, widths = arguments["input"], arguments["pad"]
    tokens = given[x]
    pairs = list(zip(widths[::2], widths[1::2], strict=True))
    place = fake_value(x).dim() - 1 - tokens.axis.dim
    before, behind = pairs[place] if place < len(pairs) else (0, 0)
    if not before and not behind:
        return tokens.filled(None)
    constant = arguments.get("mode", "constant") == "constant"
    if not (constant and tokens.is_whole and min(before, behind) >= 0):
        raise Unproved("tokens of the end are put at the start, or cut off")
    if not behind:
        return Tokens(tokens.axis, tokens.extra + before)
    value = arguments.get("value")
    value = 0 if value is None else value
    node.replace_input_with(x, reader.filled(node, x, value))
    return Tokens(tokens.axis, tokens.extra + before + behind, value)


def _cat(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Find the tokens that are put after a fixed number of others."""
    *first, last = arguments["tensors"]
    dim = arguments.get("dim", 0) % fake_value(last).dim()
    tokens = given.get(last)
    if tokens is None or tokens.axis.dim != dim:
        return reader.traced(node, given)
    if any(x in given for x in first) or not tokens.is_whole:
        raise Unproved("tokens are put behind others")
    others = [fake_value(x).shape for x in first]
    more = sum(int(n[dim]) for n in others if len(n) > dim)  # torch takes [0] too
    return Tokens(tokens.axis, tokens.extra + more, tokens.fill)


def by_rows(reader: RuleContext, node: fx.Node, given: Given) -> Found:
    """Find the tokens of a call that treats every row alike, but for what it counts."""
    rows = row_program_of(node)
    assert rows is not None
    operands = node.args[1:]
    if not all(rows.results) and rows.not_counted is None:
        raise Unproved("it sums or counts over the tokens")
    pairs = zip(operands, rows.arguments, strict=True)
    if any(x in given for x, has_rows in pairs if not has_rows):
        raise Unproved("tokens are read as what is no row of them")
    (found, *others) = {tokens.filled(None) for tokens in given.values()}
    if others or found.axis.dim != 0:
        raise Unproved("its rows are not those of the same tokens")
    if all(rows.results):
        return (found,) * len(rows.results)
    for x, nothing in zip(operands, rows.not_counted or (), strict=True):
        if nothing is not None and isinstance(x, fx.Node) and x in given:
            node.replace_input_with(x, reader.filled(node, x, nothing))
    return (None,) * len(rows.results)


RULES: dict[str, Rule] = {
    **dict.fromkeys(OF_CLASSES, class_loss),
    **dict.fromkeys(ELEMENTWISE, elementwise_loss),
    "sum": _sum,
    "mean": _sum,
    "getitem": _getitem,
    "select": _select,
    "pad": _pad,
    "cat": _cat,
    **dict.fromkeys(("max", "amax", "argmax", "logsumexp"), largest),
    **dict.fromkeys(("min", "amin", "argmin"), smallest),
    "any": any_of,
    "all": all_of,
    **dict.fromkeys(("softmax", "log_softmax"), softmax),
    **dict.fromkeys(("matmul", "bmm", "mm"), product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolved),
}
