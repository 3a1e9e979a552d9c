"""Tell which calls are token-wise, and which axes of operands and result correspond.

A call is token-wise along an axis if the result for some tokens follows from its
operands for these tokens. A call that adds up over the tokens gives a sum: the results
of tiles are added. A call without a rule is not token-wise as far as anybody knows, and
is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ..graph.sequence_tokens import TokenAxis
from .axes import Operands, TokenSum, value_of
from .token_rules import (
    CONSTANT,
    MOVED,
    POINTWISE,
    PRODUCT,
    REDUCTION,
    VIEW,
    Rule,
    along,
)

aten = torch.ops.aten


def operands_of(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    """Return the operands' axes of a token-wise call whose result has `axis`.

    None: the call is not token-wise, or not known to be.
    """
    rule = rule_of(node)
    found = None if rule is None else rule.operands(node, axis, tokens)
    if found is None:
        return None
    for operand, at in found.items():
        value = value_of(operand)
        if not isinstance(value, Tensor) or value.shape[at.dim] != at.size(tokens):
            return None
    return found


def result_of(
    node: fx.Node, axes: Mapping[fx.Node, TokenAxis], tokens: int
) -> tuple[TokenAxis | TokenSum, Operands] | None:
    """Return the axes of the result and of all operands, from the axes that are known.

    None: the call is not token-wise, or not known to be, or what is known contradicts.
    """
    rule = rule_of(node)
    if rule is None:
        return None
    for operand in node.all_input_nodes:
        if operand not in axes:
            continue
        result = rule.result(node, operand, axes[operand], tokens)
        if result is None:
            return None
        found, operands = result
        if isinstance(found, TokenAxis):
            checked = operands_of(node, found, tokens)
            if checked is None:
                return None
            operands = checked
        known = {x: axes[x] for x in node.all_input_nodes if x in axes}
        if any(operands.get(x) != at for x, at in known.items()):
            return None
        return found, operands
    return None


def _is_of_known_size(node: fx.Node) -> bool:
    """Tell whether a node makes a tensor without symbols.

    To compare symbols would fix them.
    """
    value = value_of(node)
    return isinstance(value, Tensor) and all(isinstance(n, int) for n in value.shape)


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a call; None if it is not known to be token-wise."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target._schema.is_mutable:
        return None
    if not all(map(_is_of_known_size, (node, *node.all_input_nodes))):
        return None
    if target in _RULES:
        return _RULES[target]
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return POINTWISE if torch.Tag.pointwise in target.tags and not drawn else None


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(
        (
            aten._to_copy.default,
            aten.alias.default,
            aten.detach.default,
            aten.lift_fresh_copy.default,
            aten.expand.default,
            aten.full_like.default,
            aten.zeros_like.default,
            aten.ones_like.default,
        ),
        POINTWISE,
    ),
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        VIEW,
    ),
    **dict.fromkeys(
        (
            aten.permute.default,
            aten.t.default,
            aten.transpose.int,
            aten.select.int,
        ),
        MOVED,
    ),
    **dict.fromkeys(
        (
            aten.sum.dim_IntList,
            aten.sum.default,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.logsumexp.default,
        ),
        REDUCTION,
    ),
    **dict.fromkeys(
        (aten.mm.default, aten.addmm.default, aten.bmm.default),
        PRODUCT,
    ),
    **dict.fromkeys(
        (aten._softmax.default, aten._log_softmax.default, aten.gather.default),
        along("dim", 1),
    ),
    **dict.fromkeys(
        (aten.scatter.value, aten.scatter.src, aten.scatter_add.default),
        along("dim", 1),
    ),
    **dict.fromkeys(
        (
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
        ),
        along("dim", 2),
    ),
    aten.slice.Tensor: along("dim", 1),
    aten.slice_scatter.default: along("dim", 2),
    aten.cat.default: along("dim", 1),
    aten.full.default: CONSTANT,
}
