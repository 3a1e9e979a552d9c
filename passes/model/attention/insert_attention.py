"""Replace attention calls by the cp:: operator of their plan.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      ->
    ring = cp.ring_attention(q, k, v, Sq, Sk, True, scale, group)
    out  = getitem(ring, 0)

    ulysses = cp.ulysses_attention(q, k, v, Sq, Sk, True, scale, group)
    hybrid  = cp.hybrid_attention(..., group, ulysses_group, ring_group, ulysses_inner)

    masked  = cp.ring_attention(..., Sq, Sk, False, scale, group, key_ranges=key_ranges)

The operator has the meaning of the call on the *global* tensors. Its DTensor rule and
shard_graph see to it that q, k and v lie sharded over the ranks.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import OpOverload

import cpcompile.ops  # noqa: F401  (registers the operators)
from cpcompile.cost.plans import Plan
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import is_symbol
from cpcompile.ops.step.dropout import SEED_LIMIT
from cpcompile.ops.step.row_mask import MASK_FIELDS

from ...graph.calls import canonical_call, set_argument
from ...graph.context import AttentionCall, Context
from ...graph.cp_attention import (
    CALL,
    OPERATORS,
    dtype_in_call,
    operands_of,
    part_of,
    result_of,
)
from ...graph.graph_pass import graph_pass
from ...graph.nodes import fake_value, insert_call
from ..masks.erase_masks import erase_masks
from ..masks.mask_work import known_mask


@graph_pass(
    reads=(
        "plans",
        "masks",
        "mask_sources",
        "read_by_value",
    )
)
def insert_attention(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite the calls that have a plan; returns their number."""
    results: dict[fx.Node, fx.Node] = {}  # of calls that are replaced already
    for call, plan in ctx.findings.plans.items():
        results[call.node] = _replace(call, plan, ctx, results)
    erase_masks(graph, ctx.findings.mask_sources)
    return len(ctx.findings.plans)


def change_plan(node: fx.Node, plan: Plan, ctx: Context) -> fx.Node:
    """Replace an operator by that of another plan; returns the new one."""
    call, old = node.meta[CALL], result_of(node)
    given = canonical_call(node).arguments
    lengths = given["q_len"], given["kv_len"]
    operands = (*operands_of(node), *lengths)
    with node.graph.inserting_before(node):
        # as shard_graph has placed them
        values = given["bias"] if call.score_mod else None
        rest = (fake_value(old), given["sinks"], given["seeds"], values)
        new = _insert(call, plan, ctx, operands, *rest, like=node)
    for number, part in ((0, old), (1, None if old is node else part_of(node, 1))):
        by = None if part is None else part_of(new, number)
        if part is not None:
            part.replace_all_uses_with(result_of(new) if by is None else by)
            node.graph.erase_node(part)
    if old is not node:
        node.graph.erase_node(node)
    return new


def set_layout(node: fx.Node, layout: Layout) -> None:
    """Tell an operator in which layout its operands are."""
    set_argument(node, "layout", layout.value)


def _replace(
    call: AttentionCall,
    plan: Plan,
    ctx: Context,
    results: dict[fx.Node, fx.Node],
) -> fx.Node:
    """Replace a call by its operator; returns the node that stands for its result."""
    node, graph = call.node, call.node.graph
    out = fake_value(node)
    with graph.inserting_before(node):
        q, k, v = (_prepare(call, results.get(x, x)) for x in (call.q, call.k, call.v))
        lengths = (_length(call, x) for x in (q, k))
        whole = out.unsqueeze(1) if out.ndim == 3 else out
        operands = (q, k, v, *lengths)
        attention = _insert(call, plan, ctx, operands, whole, call.sinks, like=node)
        result = result_of(attention)
        if fake_value(call.q).ndim == 3:
            args = (result, 1)
            result = insert_call(graph, torch.squeeze, args, like=node, value=out)
    if call.lse is not None:
        lse = part_of(attention, 1)
        assert lse is not None, "a plan whose operator returns it"
        call.lse.replace_all_uses_with(lse)
        graph.erase_node(call.lse)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def _insert(
    call: AttentionCall,
    plan: Plan,
    ctx: Context,
    operands: tuple[Any, ...],
    out: Any,
    sinks: fx.Node | None,
    seeds: fx.Node | None = None,
    values: fx.Node | None = None,
    *,
    like: fx.Node,
) -> fx.Node:
    """Insert the operator of a plan; operands: q, k, v [B, H, S, D] and the lengths."""
    lse = torch.empty(fake_value(operands[0]).shape[:-1], device="meta")
    if call.lse is not None:
        lse = fake_value(call.lse)
    target = OPERATORS[plan.strategy]
    several = len(target._schema.returns) > 1
    mask = ctx.findings.masks.get(call)
    is_causal = call.is_causal
    kwargs: dict[str, Any] = {}
    if mask is not None:
        bias = _in_dtype_of_call(call, mask.bias)
        given = (bias, mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
        fields = zip(MASK_FIELDS, given, strict=True)
        kwargs |= {name: x for name, x in fields if x is not None}
        is_causal = False  # it is in the key ranges
        if (known := known_mask(mask, *operands[3:])) is not None:
            kwargs["known"] = known
    if call.score_mod:
        kwargs |= {"score_mod": call.score_mod, "bias": values or call.values}
        is_causal = False  # its text says so, and key ranges
    if call.softcap:
        kwargs["softcap"] = call.softcap
    if call.dropout_p:
        kwargs |= {"dropout_p": call.dropout_p, "seeds": seeds or _seeds(call)}
    if sinks is not None:
        kwargs["sinks"] = sinks
    node = insert_call(
        like.graph,
        target,
        (*operands, is_causal, call.scale, *_groups(target, plan, ctx)),
        like=like,
        value=(out, lse) if several else out,
        kwargs=kwargs,
    )
    node.meta[CALL] = call
    if several:
        parts = (out, lse) if call.lse is not None else (out,)
        for number, value in enumerate(parts):
            args = (node, number)
            insert_call(like.graph, operator.getitem, args, like=like, value=value)
    return node


def _seeds(call: AttentionCall) -> fx.Node:
    """Insert the seeds of a call's dropout: a number for every batch entry and head.

    They are alike on all ranks.
    """
    q = fake_value(call.q)
    shape = (call.q_shape[0], call.q_shape[1] if q.ndim == 4 else 1)
    return insert_call(
        call.node.graph,
        torch.randint,
        (SEED_LIMIT, shape),
        like=call.node,
        value=q.new_empty(shape, dtype=torch.int64),
        kwargs={"device": q.device},
    )


def _in_dtype_of_call(call: AttentionCall, bias: fx.Node | None) -> fx.Node | None:
    """Bring a mask that is added to the dtype to which autocast brings the call."""
    if bias is None:
        return bias
    value = fake_value(bias)
    dtype = dtype_in_call(call, value.dtype)
    if value.dtype == dtype:
        return bias
    return insert_call(
        call.node.graph,
        torch.Tensor.to,
        (bias, dtype),
        like=call.node,
        value=value.to(dtype),
    )


def _groups(target: OpOverload, plan: Plan, ctx: Context) -> tuple[str | bool, ...]:
    """Return the last arguments of the operator: which groups it works on."""
    if "ring_group" not in [x.name for x in target._schema.arguments]:
        return (ctx.group_name,)
    degrees = plan.chosen.degrees
    groups = ctx.hybrid_groups(degrees)
    inner = degrees.inner == "ulysses"
    return (ctx.group_name, groups.ulysses, groups.ring, inner)


def _length(call: AttentionCall, operand: fx.Node) -> int | fx.Node:
    """Return the number of tokens of an operand [B, H, S, D], as an argument."""
    size = fake_value(operand).shape[2]
    if not is_symbol(size):
        return int(size)
    args = (operand, 2)
    return insert_call(
        call.node.graph, torch.Tensor.size, args, like=call.node, value=size
    )


def _prepare(call: AttentionCall, operand: fx.Node) -> fx.Node:
    """Bring an operand to [B, H, S, D], in the dtype that autocast gives the call."""
    graph, value = call.node.graph, fake_value(operand)
    dtype = fake_value(call.node).dtype
    if value.dtype != dtype:
        value = value.to(dtype)
        operand = insert_call(
            graph, torch.Tensor.to, (operand, dtype), like=call.node, value=value
        )
    if value.ndim == 3:
        value = value.unsqueeze(1)
        operand = insert_call(
            graph, torch.unsqueeze, (operand, 1), like=call.node, value=value
        )
    return operand
