"""Rules of `token_axes`, by the kind of call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ..graph.sequence_tokens import TokenAxis
from .axes import SUM, Operands, TokenSum, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Rule:
    """The rule of a kind of call, as two functions; n is the number of tokens.

    operands: called with (node, axis of the result, n). result: called with (node,
    operand, its axis, n).
    """

    operands: Callable[[fx.Node, TokenAxis, int], Operands | None]
    result: Callable[
        [fx.Node, fx.Node, TokenAxis, int], tuple[TokenAxis | TokenSum, Operands] | None
    ]


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if isinstance(value_of(x), Tensor)]


# Calls that treat every element by itself, after broadcasting from the right.


def _pointwise_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    found, dims = {}, value_of(node).dim()
    for operand in _tensors(node):
        value = value_of(operand)
        dim = axis.dim - (dims - value.dim())
        if dim >= 0 and (value.shape[dim] != 1 or axis.size(tokens) == 1):
            found[operand] = axis.moved(dim)
    return found


def _pointwise_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands]:
    return axis.moved(axis.dim + value_of(node).dim() - value_of(operand).dim()), {}


POINTWISE = Rule(_pointwise_operands, _pointwise_result)


# Calls along one dimension, which is not the dimension of the tokens.


def along(name: str, position: int) -> Rule:
    """Make the rule of calls along a dimension, named `name` or at `position`.

    All operands and the result have the same dimensions, except for sizes along that
    one.
    """

    def dim_of(node: fx.Node) -> int:
        given = node.kwargs.get(name, 0)
        dim = node.args[position] if len(node.args) > position else given
        assert isinstance(dim, int), f"{node} along {dim}"
        return dim % int(value_of(node).dim())

    def operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
        every = _tensors(node)
        dims = value_of(node).dim()
        if axis.dim == dim_of(node) or any(value_of(x).dim() != dims for x in every):
            return None
        return dict.fromkeys(every, axis)

    def result(
        node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
    ) -> tuple[TokenAxis, Operands]:
        return axis, {}

    return Rule(operands, result)


# Views, which keep the order of the elements.


def regrouped(
    axis: TokenAxis, shape: tuple[int, ...], new: tuple[int, ...], n: int
) -> TokenAxis | None:
    """Return where tokens are after a view of `shape` as `new`; None if torn apart."""
    before = math.prod(shape[: axis.dim]) * axis.outer
    product = 1
    for dim, size in enumerate(new):
        if size != 1 and before % product == 0 and (product * size) % (before * n) == 0:
            return TokenAxis(dim, before // product, product * size // (before * n))
        product *= size
    return None


def _view_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    operand = node.all_input_nodes[0]
    shapes = tuple(value_of(node).shape), tuple(value_of(operand).shape)
    found = regrouped(axis, *shapes, tokens)
    return None if found is None else {operand: found}


def _view_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    shapes = tuple(value_of(operand).shape), tuple(value_of(node).shape)
    found = regrouped(axis, *shapes, tokens)
    return None if found is None else (found, {})


VIEW = Rule(_view_operands, _view_result)


# Calls that move or drop dimensions: order[i] is the operand's dimension of result's i.


def _order(node: fx.Node) -> list[int] | None:
    dims = value_of(node.all_input_nodes[0]).dim()
    order = list(range(dims))
    if node.target is aten.permute.default:
        given = node.args[1]
        assert isinstance(given, list | tuple), f"{node} has {given}"
        return [int(d) % dims for d in given]  # type: ignore[arg-type]  # they are ints
    if node.target is aten.t.default:
        return order[::-1]
    if node.target is aten.transpose.int:
        one, other = (int(d) % dims for d in node.args[1:3])  # type: ignore[arg-type]
        order[one], order[other] = order[other], order[one]
        return order
    assert node.target is aten.select.int, f"{node}"
    del order[int(node.args[1]) % dims]  # type: ignore[arg-type]
    return order


def _moved_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    order = _order(node)
    assert order is not None
    return {node.all_input_nodes[0]: axis.moved(order[axis.dim])}


def _moved_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis, Operands] | None:
    order = _order(node)
    if order is None or axis.dim not in order:
        return None
    return axis.moved(order.index(axis.dim)), {}


MOVED = Rule(_moved_operands, _moved_result)


# Reductions.


def _reduced(node: fx.Node) -> tuple[list[int], bool]:
    """Return the operand's reduced dimensions, and whether they stay with size 1."""
    dims = value_of(node.all_input_nodes[0]).dim()
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    which: Any = given.get("dim")
    if which is None or which == []:
        which = list(range(dims))
    which = [which] if isinstance(which, int) else which
    return [int(d) % dims for d in which], bool(given.get("keepdim", False))


def _kept(node: fx.Node) -> list[int | None]:
    """Return the operand's dimension of each dimension of the result.

    None for a dimension that is reduced to size 1.
    """
    reduced, keepdim = _reduced(node)
    every = range(value_of(node.all_input_nodes[0]).dim())
    if keepdim:
        return [None if d in reduced else d for d in every]
    return [d for d in every if d not in reduced]


def _reduction_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    dim = _kept(node)[axis.dim]
    return None if dim is None else {node.all_input_nodes[0]: axis.moved(dim)}


def _reduction_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis | TokenSum, Operands] | None:
    kept = _kept(node)
    if axis.dim in kept:
        return axis.moved(kept.index(axis.dim)), {}
    if node.target not in _SUMS:
        return None
    return SUM, {operand: axis}


_SUMS = {aten.sum.dim_IntList, aten.sum.default}
REDUCTION = Rule(_reduction_operands, _reduction_result)


# Matrix products: [..., M, K] x [..., K, N].


def _product_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    *added, left, right = node.args[:3]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node), f"{node}"
    rows = value_of(node).dim() - 2
    if left is right:
        return None
    if axis.dim < rows:  # of a batch
        return None if added else {left: axis, right: axis}
    one = left if axis.dim == rows else right
    found = {one: axis}
    for operand in added:  # a row that is added to all, or as large as the result
        assert isinstance(operand, fx.Node), f"{node}"
        value = value_of(operand)
        dim = axis.dim - (value_of(node).dim() - value.dim())
        if dim >= 0 and value.shape[dim] != 1:
            found[operand] = axis.moved(dim)
    return found


def _product_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis | TokenSum, Operands] | None:
    *added, left, right = node.args[:3]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node), f"{node}"
    rows, dims = value_of(node).dim() - 2, value_of(node).dim()
    if left is right:
        return None
    if operand in added:
        return axis.moved(axis.dim + dims - value_of(operand).dim()), {}
    inner = rows + 1 if operand is left else rows
    if axis.dim != inner:
        return axis, {}
    if added:  # which every tile would add
        return None
    return SUM, {left: axis.moved(rows + 1), right: axis.moved(rows)}


PRODUCT = Rule(_product_operands, _product_result)


# New values, the same for every token.


def _constant_operands(node: fx.Node, axis: TokenAxis, tokens: int) -> Operands | None:
    return {}


def _no_result(
    node: fx.Node, operand: fx.Node, axis: TokenAxis, tokens: int
) -> tuple[TokenAxis | TokenSum, Operands] | None:
    return None


CONSTANT = Rule(_constant_operands, _no_result)
