"""Calls that compute with the number of tokens: x.sum(1) / x.shape[1]."""

from __future__ import annotations

import torch.fx as fx
from torch import Tensor

from ...graph.calls import canonical_call, function_of
from ...graph.nodes import fake_value
from .masking import PaddingMasker
from .padded_tokens import Found, Unproved
from .sizes import COMPUTES, Sizes

# For these a number is the same as a tensor without dimensions.
ARITHMETIC = {"add", "sub", "mul", "div", "lt", "le", "gt", "ge", "eq", "ne"}


def with_real_numbers(
    node: fx.Node, operands: dict[fx.Node, Found], sizes: Sizes, masker: PaddingMasker
) -> dict[fx.Node, Found]:
    """Give a call the real number of tokens for P; returns its operands.

    Raises: Unproved, where a tensor gives another dtype than a number does.
    """
    known: dict[fx.Node, Found] = {}
    for x, found in operands.items():
        extra = sizes.extra_of(fake_value(x))
        if extra is None:
            known[x] = found
            continue
        factors = canonical_call(node).arguments
        if x not in (factors.get("input"), factors.get("other")):
            raise Unproved(COMPUTES)  # alpha, which is no tensor
        real = masker.number(node, extra)
        node.replace_input_with(x, real)
        known[real] = None
    if known.keys() != operands.keys():
        args, kwargs = fx.map_arg((node.args, node.kwargs), fake_value)
        with masker.fake_mode:
            result: Tensor = function_of(node)(*args, **kwargs)
        if result.dtype != fake_value(node).dtype:
            raise Unproved(COMPUTES)
    return known
