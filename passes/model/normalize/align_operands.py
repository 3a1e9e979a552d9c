"""Bring attention calls to the form that the operators take: [B, H, S, D], one batch.

    attention(q [B, F, H, S, D], k [B, F, H, S, D], v)
      ->
    attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (B, F))

    attention(q [B, H, S, D], k [1, H, S, D], v [1, H, S, D])
      ->
    attention(q, k.expand(B, -1, -1, -1), v.expand(B, -1, -1, -1))

torch takes any number of leading dimensions and broadcasts them. Calls of three or four
dimensions that agree stay as they are; a single key head is broadcast by the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import LengthNotSymbolic, is_same, is_symbol

from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call, set_argument
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_nodes, fake_value, insert_call
from ...graph.transforms import inside_transforms
from ..attention.find_attention import already_local, attention_operands

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _CommonSizes:
    """The sizes that the operands of a call share once they are broadcast."""

    ndim: int  # of the largest, at least 4
    batches: Shape  # sizes of all dimensions before the heads
    heads: int  # of the queries
    kv_heads: int


@graph_pass()
def align_operands(graph: fx.Graph, ctx: Context) -> int:
    """Bring attention calls to the form [B, H, S, D]; return how many were of another.

    Raises: LengthNotSymbolic if a batch dimension is a symbol, and not of all operands.
    """
    transformed = inside_transforms(graph)  # where dimensions have another meaning
    calls = [x for x in all_nodes(graph) if is_attention(x) and x not in transformed]
    forms = {node: _common_sizes(node) for node in calls if already_local(node) is None}
    unaligned = [(n, f) for n, f in forms.items() if f is not None and not _has(n, f)]
    for node, form in unaligned:
        _align(node, form)
    return len(unaligned)


def _has(node: fx.Node, form: _CommonSizes) -> bool:
    """Tell whether the operands have this form, or the same without a head dim."""
    q, k, v = (tuple(x.shape[:-2]) for x in _operands(node))
    if len(q) == len(k) == len(v) == fake_value(node).ndim - 2 == 1:
        return q == k == v == (form.heads,)
    queries, keys = (*form.batches, form.heads), (*form.batches, form.kv_heads)
    return len(form.batches) == 1 and q == queries and k == v == keys


def _operands(node: fx.Node) -> list[Tensor]:
    return [fake_value(x) for x in attention_operands(node)]


def _mask(node: fx.Node) -> Tensor | None:
    value = fake_value(canonical_call(node).arguments["attn_mask"])
    return value if isinstance(value, Tensor) else None


def _common_sizes(node: fx.Node) -> _CommonSizes | None:
    """Return the common form, or None where torch does not broadcast to one."""
    operands = _operands(node)
    mask = _mask(node)
    ndim = max(4, *(x.ndim for x in operands))
    shapes = [_padded(x.shape, ndim) for x in operands]
    batches = shapes[0][:-3]
    if any(is_symbol(n) for shape in shapes for n in shape[:-3]):
        if ndim > 4 or not all(is_same(shape[0], *batches) for shape in shapes):
            raise LengthNotSymbolic(f"a batch dimension of {node.name} is a symbol")
    else:
        batches = torch.broadcast_shapes(*(shape[:-3] for shape in shapes))
    q_heads, k_heads, v_heads = (int(shape[-3]) for shape in shapes)
    kv_heads = max(k_heads, v_heads)
    if {k_heads, v_heads} - {1, kv_heads} or (mask is not None and mask.ndim > ndim):
        return None
    numbers = tuple(n if is_symbol(n) else int(n) for n in batches)
    return _CommonSizes(ndim, numbers, max(q_heads, kv_heads), kv_heads)


def _padded(shape: torch.Size, ndim: int) -> Shape:
    return (1,) * (ndim - len(shape)) + tuple(shape)


def _align(node: fx.Node, form: _CommonSizes) -> None:
    arguments, result = canonical_call(node).arguments, fake_value(node)
    with node.graph.inserting_before(node):
        for name in ("query", "key", "value"):
            heads = form.heads if name == "query" else form.kv_heads
            set_argument(node, name, _aligned(arguments[name], form, heads, node))
        mask = _mask(node)
        if mask is not None and mask.ndim > 3 and len(form.batches) > 1:
            aligned = _aligned(arguments["attn_mask"], form, mask.shape[-3], node)
            set_argument(node, "attn_mask", aligned)
    missing = form.ndim - result.ndim
    back: tuple[Callable[..., Tensor], Any] | None = None
    if missing:
        back = (torch.squeeze, (tuple(range(missing)),))
    elif len(form.batches) > 1:
        back = (torch.unflatten, (0, form.batches))
    if back is not None:
        with node.graph.inserting_after(node):
            out = _insert(*back, node, result, like=node)
        node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not out)
    whole = result
    for _ in range(missing):
        whole = whole.unsqueeze(0)
    node.meta["example_value"] = whole.flatten(0, form.ndim - 4)


def _aligned(
    operand: fx.Node, form: _CommonSizes, heads: int, like: fx.Node
) -> fx.Node:
    """Reshape an operand to [all batches, heads, tokens, dim]."""

    def insert(target: Callable[..., Tensor], *args: Any) -> fx.Node:
        value = target(fake_value(operand), *args)
        return _insert(target, args, operand, value, like)

    for _ in range(form.ndim - fake_value(operand).ndim):
        operand = insert(torch.unsqueeze, 0)
    wanted = (*form.batches, heads)
    if tuple(fake_value(operand).shape[:-2]) != wanted:
        operand = insert(torch.Tensor.expand, (*wanted, -1, -1))
    if len(form.batches) > 1:
        operand = insert(torch.flatten, 0, len(form.batches) - 1)
    return operand


def _insert(
    target: Callable[..., Any],
    rest: tuple[Any, ...],
    operand: fx.Node,
    value: Tensor,
    like: fx.Node,
) -> fx.Node:
    args = (operand, *rest)
    return insert_call(like.graph, target, args, like=like, value=value)
