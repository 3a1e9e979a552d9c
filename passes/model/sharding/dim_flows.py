"""Find where tokens go in calls that change their number or order.

    y = cat([a, x], 1)     dimension 1 of y has the tokens of a and of x
    y = x[:, 1:]           dimension 1 of y has some of the tokens of x
    y = attention(q, k, v) dimension 2 of y has the tokens of q

DTensor's propagation cannot say so, because such calls have to see tokens of other
ranks; it follows from their arguments. Reading them changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ...graph.attention_calls import is_attention, is_flex_attention
from ...graph.calls import canonical_call, spelled
from ...graph.cp_attention import SPLIT_KV, is_cp_attention, operands_of
from ...graph.mesh_changes import local_source
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import is_operand_by_rows
from ..attention.find_attention import attention_operands
from ..mutation.masked_rows import write_rows, write_rows_
from ..normalize.pad_convolutions import convolved


@dataclass(frozen=True)
class DimFlow:
    """Dimension `out` of a result has tokens of dimension `dim` of `source`."""

    source: fx.Node
    dim: int
    out: int


Rule = Callable[[dict[str, Any]], list[DimFlow] | None]


def dim_flows(node: fx.Node) -> list[DimFlow] | None:
    """Return all flows into the result of a call; None for calls of any other kind."""
    if is_attention(node):
        return _from_operands(*attention_operands(node))
    if is_cp_attention(node):
        return _from_operands(*operands_of(node))
    if node.target in (write_rows, write_rows_):
        return _all_dims({"input": node.args[0]})
    local = local_source(node)
    if local is not None or is_operand_by_rows(node):
        return _all_dims({"input": local or node.args[0]})
    operands = convolved(node)
    if operands is not None:
        return _convolved(node, *operands)
    call = canonical_call(node)
    rule = _RULES.get(call.name)
    return None if rule is None else rule(call.arguments)


def token_operands(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the operands of an attention call, each with its dimension of tokens.

    Where attention weights are shown, each operand is marked by a call of its own,
    which gives that operand.
    """
    if is_operand_by_rows(node):
        return [node.args]  # type: ignore[list-item]  # a node and a dimension
    if is_attention(node):
        operands: Sequence[Any] = attention_operands(node)
    elif is_cp_attention(node):
        operands = operands_of(node)
        if node.target is SPLIT_KV:  # every rank has all queries
            operands = operands[1:]
    elif is_flex_attention(node):
        operands = node.args[:3]
    elif spelled(node) == "multi_head_attention_forward":
        given = canonical_call(node).arguments
        operands = [given[name] for name in ("query", "key", "value")]
        return [(x, 0) for x in operands]  # [tokens, batch, channels]
    else:
        return []
    return [(x, fake_value(x).ndim - 2) for x in operands]


def part_written(node: fx.Node) -> list[DimFlow]:
    """Return the flows from the part to the base of a call `base[index] = part`."""
    if spelled(node) != "setitem":
        return []
    base, index, part = canonical_call(node).arguments.values()
    if not isinstance(part, fx.Node) or not isinstance(fake_value(part), Tensor):
        return []
    assert isinstance(base, fx.Node)
    kept = _kept_dims(index, fake_value(base).ndim)
    if kept is None:
        return []
    shape = fake_value(part).shape
    missing = 1 + max((out for _, out in kept), default=-1) - len(shape)
    return [
        DimFlow(part, out - missing, dim)
        for dim, out in kept
        if out >= missing and shape[out - missing] != 1
    ]


def _from_operands(q: fx.Node, k: fx.Node, v: fx.Node) -> list[DimFlow]:
    """Return the flows into the result of attention.

    Calls of one batch entry and of one head are independent.
    """
    found = [DimFlow(q, dim, dim) for dim in range(fake_value(q).ndim - 1)]
    return [*found, DimFlow(k, 0, 0), DimFlow(v, 0, 0)]


def _all_dims(given: dict[str, Any]) -> list[DimFlow]:
    x = given["input"]
    return [DimFlow(x, dim, dim) for dim in range(fake_value(x).ndim)]


def _convolved(node: fx.Node, x: fx.Node, weight: fx.Node) -> list[DimFlow]:
    """Return the flows of a convolution: positions and the batch.

    Positions flow only where there are as many as before.
    """
    before, after = fake_value(x).shape, fake_value(node).shape
    channels = len(after) + 1 - fake_value(weight).ndim
    return [
        DimFlow(x, dim, dim)
        for dim in range(len(after))
        if dim != channels and before[dim] == after[dim]
    ]


def _cat(given: dict[str, Any]) -> list[DimFlow] | None:
    tensors = given["tensors"]
    if not isinstance(tensors, list | tuple):
        return None
    return [
        DimFlow(x, dim, dim)
        for x in tensors
        if tuple(fake_value(x).shape) != (0,)  # as caches begin; torch ignores it
        for dim in range(fake_value(x).ndim)
    ]


def _item(given: dict[str, Any]) -> list[DimFlow] | None:
    source, index = given["input"], given["index"]
    assert isinstance(source, fx.Node)
    value = fake_value(source)
    if isinstance(value, Tensor):
        kept = _kept_dims(index, value.ndim)
        if kept is None:
            return None
        return [DimFlow(source, dim, out) for dim, out in kept]
    call = canonical_call(source)
    if call.name in _SPLITS:
        return _all_dims(call.arguments)
    if is_cp_attention(source):  # the log-sum-exp has the tokens of the queries too
        return dim_flows(source)
    if is_flex_attention(source):
        return _from_operands(*source.args[:3])  # type: ignore[arg-type]  # nodes
    if call.name == "multi_head_attention_forward" and index == 0:
        query = call.arguments["query"]
        return [DimFlow(query, dim, dim) for dim in range(fake_value(query).ndim - 1)]
    return None


def _kept_dims(index: Any, ndim: int) -> list[tuple[int, int]] | None:
    """Return (dimension, dimension of x[index]) of what slices keep.

    None for other indices. A dimension that a slice cuts short is kept.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not _is_basic(item) for item in items):
        return None
    counted = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    kept, dim, out = [], 0, 0
    for item in items:
        if item is None:
            out += 1
            continue
        length = ndim - counted if item is Ellipsis else 1
        if item is Ellipsis or isinstance(item, slice):
            kept += [(dim + i, out + i) for i in range(length)]
            out += length
        dim += length
    return kept


def _is_basic(item: Any) -> bool:
    if isinstance(item, fx.Node):
        return isinstance(fake_value(item), int | torch.SymInt)
    plain = item is None or item is Ellipsis or isinstance(item, slice | int)
    return plain and not isinstance(item, bool)


_SPLITS = ("split", "chunk", "tensor_split", "split_with_sizes")

_RULES: dict[str, Rule] = {
    "cat": _cat,
    "getitem": _item,
    "embedding": _all_dims,
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), _all_dims),
    **dict.fromkeys(("index_put", "index_put_"), _all_dims),
    **dict.fromkeys(("narrow", "roll", "flip", "pad", "dropout", "clone"), _all_dims),
}
