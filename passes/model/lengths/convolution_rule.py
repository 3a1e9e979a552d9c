"""The rule of convolutions along the tokens, which have zeros in the padding.

conv1d(x, weight, padding=2)  ->  conv1d(where(valid, x, 0), weight, padding=2)
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ...graph.calls import canonical_call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import Tokens
from .padded_tokens import Found, Unproved
from .rule_context import Given, RuleContext


def convolved(
    reader: RuleContext, node: fx.Node, arguments: dict[str, Any], given: Given
) -> Found:
    """Fill the padding with the zeros that a convolution adds after the last token.

    If the numbers of its results and of the tokens differ by a constant, as its size
    says, result i reads from token i - before on, whatever the length is.
    """
    x, weight = arguments["input"], arguments["weight"]
    if given.keys() != {x}:
        raise Unproved("the weight of a convolution has tokens")
    first = fake_value(x).dim() - (fake_value(weight).dim() - 2)
    tokens = given[x]
    if not tokens.is_whole or tokens.axis.dim < first:
        raise Unproved("a convolution of tokens that are no dimension of positions")
    extra = reader.sizes.extra_of(fake_value(node).shape[tokens.axis.dim])
    if extra is None:
        raise Unproved("a convolution changes the number of tokens")
    _fill_before_pad(reader, x)
    node.replace_input_with(x, reader.filled(node, x, 0))
    return Tokens(tokens.axis, extra)


def _fill_before_pad(reader: RuleContext, x: fx.Node) -> None:
    """Keep conv1d(pad(x, (2, 0)), ..) in that form: pad_convolutions looks for it."""
    call = canonical_call(x)
    if call.name != "pad" or call.arguments.get("value") not in (None, 0):
        return
    source = call.arguments["input"]
    tokens, before = reader.found[x], reader.found.get(source)
    if not isinstance(tokens, Tokens) or not isinstance(before, Tokens):
        return
    if tokens.fill is None and before.axis == tokens.axis:  # nothing is put after
        x.replace_input_with(source, reader.filled(x, source, 0))
        reader.found[x] = tokens.filled(0)
