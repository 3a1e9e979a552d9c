"""Where tokens go in calls that change their number or order.

    y = cat([a, x], 1)     dimension 1 of y has the tokens of a and those of x
    y = x[:, 1:]           dimension 1 of y has some of those of x
    y = attention(q, k, v) dimension 2 of y has those of q

DTensor's propagation cannot say so, because such calls have to see tokens of other
ranks; it follows from their arguments. Nothing is changed by reading it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from cpcompile.passes.attention.find_attention import attention_operands
from cpcompile.passes.attention.insert_attention import is_cp_attention
from cpcompile.passes.graph.attention_calls import is_attention
from cpcompile.passes.graph.nodes import fake_value

aten = torch.ops.aten


@dataclass(frozen=True)
class DimFlow:
    """Dimension `out` of a result has tokens of dimension `dim` of `source`."""

    source: fx.Node
    dim: int
    out: int


Rule = Callable[[fx.Node], list[DimFlow] | None]


def dim_flows(node: fx.Node) -> list[DimFlow] | None:
    """All dim_flows into a tensor; None for calls of any other kind."""
    if node.op not in ("call_function", "call_method"):
        return None
    if is_attention(node):
        return _from_operands(*attention_operands(node))
    if is_cp_attention(node):
        return _from_operands(*node.args[:3])  # type: ignore[arg-type]
    rule = _RULES.get(node.target)
    return None if rule is None else rule(node)


def token_operands(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The operands of an attention call, each with its dimension of tokens."""
    if is_attention(node):
        operands: Sequence[Any] = attention_operands(node)
    elif is_cp_attention(node):
        operands = node.args[:3]
    elif node.target is F.multi_head_attention_forward:
        needs_weights = node.args[15] if len(node.args) > 15 else True
        if node.kwargs.get("need_weights", needs_weights):
            return []  # there is no attention call inside
        names = ("query", "key", "value")
        operands = [_argument(node, i, name) for i, name in enumerate(names)]
        return [(x, 0) for x in operands]  # [tokens, batch, channels]
    else:
        return []
    return [(x, fake_value(x).ndim - 2) for x in operands]


def part_written(node: fx.Node) -> list[DimFlow]:
    """What `base[index] = part` writes: dim_flows from the part to the base."""
    if node.target is not operator.setitem:
        return []
    base, index, part = node.args
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
    """Calls of one batch entry and of one head are independent."""
    found = [DimFlow(q, dim, dim) for dim in range(fake_value(q).ndim - 1)]
    return [*found, DimFlow(k, 0, 0), DimFlow(v, 0, 0)]


def _all_dims(node: fx.Node) -> list[DimFlow]:
    x = _argument(node, 0, "input")
    return [DimFlow(x, dim, dim) for dim in range(fake_value(x).ndim)]


def _embedding(node: fx.Node) -> list[DimFlow]:
    ids = _argument(node, 0, "input")
    return [DimFlow(ids, dim, dim) for dim in range(fake_value(ids).ndim)]


def _cat(node: fx.Node) -> list[DimFlow] | None:
    tensors = _argument(node, 0, "tensors")
    if not isinstance(tensors, list | tuple):
        return None
    return [
        DimFlow(x, dim, dim)
        for x in tensors
        if tuple(fake_value(x).shape) != (0,)  # as caches begin; it does not count
        for dim in range(fake_value(x).ndim)
    ]


def _item(node: fx.Node) -> list[DimFlow] | None:
    source, index = node.args
    assert isinstance(source, fx.Node)
    value = fake_value(source)
    if isinstance(value, Tensor):
        kept = _kept_dims(index, value.ndim)
        if kept is None:
            return None
        return [DimFlow(source, dim, out) for dim, out in kept]
    if source.target in _SPLITS:
        return _all_dims(source)
    if is_cp_attention(source) and index == 0:
        return dim_flows(source)
    if source.target is F.multi_head_attention_forward and index == 0:
        query = _argument(source, 0, "query")
        return [DimFlow(query, dim, dim) for dim in range(fake_value(query).ndim - 1)]
    return None


def _kept_dims(index: Any, ndim: int) -> list[tuple[int, int]] | None:
    """(dimension, dimension of x[index]) of what slices keep; None for other indices.

    A dimension that a slice cuts short is kept.
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


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs[name]


_SPLITS = {
    torch.split, torch.chunk, torch.tensor_split, "split", "chunk", "tensor_split",
    "split_with_sizes", torch.split_with_sizes,
}  # fmt: skip

_RULES: dict[Any, Rule] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    aten.cat.default: _cat,
    operator.getitem: _item,
    torch.narrow: _all_dims,
    "narrow": _all_dims,
    torch.roll: _all_dims,
    "roll": _all_dims,
    torch.flip: _all_dims,
    "flip": _all_dims,
    F.pad: _all_dims,
    torch._C._nn.pad: _all_dims,  # as Dynamo has it
    F.dropout: _all_dims,
    F.embedding: _embedding,
    "clone": _all_dims,
}
