"""Rules of aten calls for padded tokens, in addition to those for tiles of tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ...flow.axes import Operands
from ...flow.token_rules import POINTWISE, REDUCTION, Rule, along
from ...graph.sequence_tokens import TokenAxis

aten = torch.ops.aten


def _same_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    return {node.all_input_nodes[0]: axis}


def _same_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    return axis, {}


_SAME = Rule(_same_operands, _same_result)


def _along_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    """Return the axis of a call along a dimension, which is not that of the tokens."""
    names = [x.name for x in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    dim: Any = given.get("dim", _LAST.get(node.target, 0))
    dims = operand.meta["val"].dim()
    if dim % dims == axis.dim:
        return None
    if node.target is aten.unbind.int and dim % dims < axis.dim:
        return axis.moved(axis.dim - 1), {}
    return axis, {}


_ALONG = Rule(_same_operands, _along_result)
_LAST: dict[Any, int] = {aten.topk.default: -1, aten.sort.default: -1}


def _scan_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    """Return the axis of a running sum.

    It reads what is before a token, which the padding never is.
    """
    whole = axis.outer == axis.inner == 1
    return (axis, {}) if whole else _along_result(node, operand, axis, tokens)


def _padded_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    """Return the axis of a pad in other dimensions than that of the tokens.

    A shift of the tokens may keep their number.
    """
    widths: Any = node.args[1]
    place = 2 * (operand.meta["val"].dim() - 1 - axis.dim)
    return None if any(widths[place : place + 2]) else (axis, {})


def _looked_up_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    return (axis, {operand: axis}) if operand is node.args[1] else None


def _gathered_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    """Return the axis of a gather along the tokens of its indices.

    It reads a table that has no tokens. A gather along another dimension is read like
    any call along that dimension.
    """
    _, dim, index = node.args[:3]
    assert isinstance(dim, int)
    if operand is index and dim % operand.meta["val"].dim() == axis.dim:
        return axis, {operand: axis}
    return along("dim", 1).result(node, operand, axis, tokens)  # type: ignore[return-value]


def _index_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    """Return the axis of rows of a table, by indices that have the tokens."""
    _, indices = node.args
    assert isinstance(indices, list | tuple)
    if operand is node.args[0] or any(x is None for x in indices):
        return None
    dims = [x.meta["val"].dim() for x in indices]  # type: ignore[union-attr]
    if len(set(dims)) > 1 and len(indices) > 1:
        return None
    return axis, {operand: axis}


RULES: dict[Any, Rule] = {
    aten.clone.default: POINTWISE,
    aten.copy.default: POINTWISE,
    aten.bernoulli.p: POINTWISE,
    aten.bernoulli.default: POINTWISE,
    aten.rand_like.default: POINTWISE,
    aten.native_dropout.default: _SAME,
    aten.view_as_real.default: _SAME,
    aten.view_as_complex.default: _SAME,
    aten.split.Tensor: _ALONG,
    aten.split_with_sizes.default: _ALONG,
    aten.unbind.int: _ALONG,
    aten.topk.default: _ALONG,
    aten.sort.default: _ALONG,
    aten.index_select.default: _ALONG,
    aten.cumsum.default: Rule(_same_operands, _scan_result),
    aten.constant_pad_nd.default: Rule(_same_operands, _padded_result),
    aten.gather.default: Rule(along("dim", 1).operands, _gathered_result),
    aten.embedding.default: Rule(_same_operands, _looked_up_result),
    aten.index.Tensor: Rule(_same_operands, _index_result),
    **dict.fromkeys(
        (
            aten.var_mean.correction,
            aten.var.correction,
            aten.std.correction,
            aten.max.dim,
            aten.min.dim,
            aten.argmax.default,
            aten.argmin.default,
            aten.prod.dim_int,
            aten.all.dim,
        ),
        REDUCTION,
    ),
}
SEVERAL = {
    aten.native_dropout.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unbind.int,
    aten.topk.default,
    aten.sort.default,
    aten.var_mean.correction,
    aten.max.dim,
    aten.min.dim,
}
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.permute.default,
    aten.transpose.int,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
}
