"""Replace attention calls by the cp:: operator of their plan.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      ->
    ring = cp.ring_attention(q, k, v, [], [Sq, Sk], "causal scale=0.125", group)
    out  = getitem(ring, 0)

    hybrid = cp.hybrid_attention(..., group, ulysses_group, ring_group, ulysses_inner)

    masked = cp.ring_attention(
        q, k, v, [key_ranges], [Sq, Sk], "scale=0.125 +key_ranges", group
    )

The operator has the meaning of the call on the *global* tensors. By its DTensor rule
`localise` has q, k and v sharded over the ranks. Keys and values of gathered latents
are made on every rank, by copies of the calls that make them; what else reads them
reads the old ones. In the backward all of this is done again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

import cpcompile.ops  # noqa: F401  (registers the operators)
from cpcompile.cost.plans import Plan, Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.lengths import is_symbol
from cpcompile.ops.attention_spec import MASK_FIELDS, AttentionSpec
from cpcompile.ops.step.dropout import SEED_LIMIT
from cpcompile.torch_private.operators import OpOverload

from ...graph.context import AttentionCall, Context, KeySources
from ...graph.cp_attention import (
    CALL,
    OPERATORS,
    PLAN,
    dtype_in_call,
    part_of,
    result_of,
)
from ...graph.graph_pass import graph_pass
from ...graph.nodes import RECOMPUTE_LAST, fake_value, insert_call
from ...graph.sequence_tokens import Wanted, constraint
from ..masks.erase_masks import erase_masks
from ..masks.mask_work import known_mask


@graph_pass(
    reads=(
        "plans",
        "masks",
        "mask_sources",
        "read_by_value",
        "key_sources",
    )
)
def insert_attention(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite the calls that have a plan; returns their number."""
    results: dict[fx.Node, fx.Node] = {}  # of calls that are replaced already
    for call, plan in ctx.findings.plans.items():
        results[call.node] = _replace(call, plan, ctx, results)
    erase_masks(graph, ctx.findings.mask_sources)
    return len(ctx.findings.plans)


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
        keys = [call.k, call.v]
        if plan.strategy is Strategy.LATENTS:
            latent = LatentKeys(ctx.findings.key_sources[call], ctx.backward)
            keys = [latent.of(x) for x in keys]
        q, k, v = (_prepare(call, results.get(x, x)) for x in (call.q, *keys))
        sizes = [_length(call, x) for x in (q, k)]
        whole = out.unsqueeze(1) if out.ndim == 3 else out
        extras, spec = _computed(call, ctx, sizes)
        spec = replace(
            spec,
            whole_keys=plan.strategy is Strategy.LATENTS,
            head_groups=plan.chosen.head_groups,
        )
        operands = (q, k, v, extras, sizes, str(spec))
        attention = _insert(call, plan, ctx, operands, whole, like=node)
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


def _computed(
    call: AttentionCall, ctx: Context, sizes: Sequence[int | fx.Node]
) -> tuple[list[fx.Node], AttentionSpec]:
    """Return what a call computes, and the tensors that the spec names."""
    spec = AttentionSpec(
        scale=call.scale,
        is_causal=call.is_causal,
        softcap=call.softcap,
        dropout_p=call.dropout_p,
        score_mod=call.score_mod,
        wants_lse=call.lse is not None,
    )
    extras: dict[str, fx.Node | None] = {"sinks": call.sinks}
    if (mask := ctx.findings.masks.get(call)) is not None:
        bias = _in_dtype_of_call(call, mask.bias)
        fields = (bias, mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
        extras |= zip(MASK_FIELDS, fields, strict=True)
        spec = replace(spec, mask_key=known_mask(mask, *sizes) or "")
    if call.score_mod:
        extras["bias"] = call.values
    if call.dropout_p:
        extras["seeds"] = _seeds(call)
    if mask is not None or call.score_mod:
        spec = replace(spec, is_causal=False)  # the key ranges say it
    own, tensors = spec.with_extras(extras)
    return tensors, own


def _insert(
    call: AttentionCall,
    plan: Plan,
    ctx: Context,
    operands: tuple[Any, ...],
    value: Tensor,
    *,
    like: fx.Node,
) -> fx.Node:
    """Insert the operator of a plan, and a node for each of its results that is read.

    operands: up to the spec. value: of the attention, as the model has it.
    """
    target = OPERATORS[plan.strategy]
    shape: Sequence[Any] = [0]  # of a log-sum-exp that is not wanted
    if call.lse is not None or STRATEGIES[plan.strategy].always_gives_lse:
        shape = value.shape[:-1]
    values = value, torch.empty(shape, device="meta")
    arguments = (*operands, *_groups(target, plan, ctx))
    node = insert_call(like.graph, target, arguments, like=like, value=values)
    custom = {PLAN: [*ctx.findings.plans].index(call)}
    node.meta |= {CALL: call, "custom": node.meta.get("custom", {}) | custom}
    for number in range(1 if call.lse is None else 2):
        part, one = (node, number), values[number]
        insert_call(like.graph, operator.getitem, part, like=like, value=one)
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
    return (ctx.group_name, groups.ulysses, groups.ring, degrees.inner == "ulysses")


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


class LatentKeys:
    """The calls that every rank makes for one attention."""

    def __init__(self, sources: KeySources, backward: bool) -> None:
        self.sources, self.backward = sources, backward
        self.copies: dict[fx.Node, fx.Node] = {}

    def of(self, x: fx.Node) -> fx.Node:
        """Return what stands for keys or values, before the insertion point."""
        args, value = (self._whole(x), Wanted.COMPUTED_KEYS), fake_value(x)
        made = insert_call(x.graph, constraint, args, like=x, value=value)
        return self._tagged(made)

    def _whole(self, x: fx.Node) -> fx.Node:
        """Return the node that every rank has of a value."""
        if x not in self.copies:
            if x in self.sources.computed:
                args, kwargs = fx.map_arg((x.args, x.kwargs), self._whole)
                with x.graph.inserting_after(x):
                    copy = x.graph.node_copy(x, lambda operand: operand)
                copy.args, copy.kwargs, copy.meta = args, kwargs, dict(x.meta)
                self.copies[x] = self._tagged(copy)
            elif isinstance(fake_value(x), Tensor):
                self.copies[x] = self._source(x)
            else:
                return x  # a size
        return self.copies[x]

    def _source(self, x: fx.Node) -> fx.Node:
        last = x
        if x.op == "placeholder":
            last = x.graph.find_nodes(op="placeholder")[-1]
        args = (x, Wanted.KEY_SOURCE, self.sources.gathered.get(x))
        with x.graph.inserting_after(last):
            value = fake_value(x)
            source = insert_call(x.graph, constraint, args, like=x, value=value)
        return self._tagged(source)

    def _tagged(self, node: fx.Node) -> fx.Node:
        """Have the backward make a value again, as it does what a region holds."""
        if self.backward:
            node.meta |= RECOMPUTE_LAST
        return node
