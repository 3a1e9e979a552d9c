"""Fold attention patterns into one call each, which later passes read.

    scores = matmul(q, k.mT) * 0.25
    weights = softmax(scores.masked_fill(~mask, -inf), -1)
    out = matmul(weights, v)
      ->
    out = plain_attention(q, k, v, attn_mask=mask, scale=0.25)

Only attention over a sequence that an input has is folded (pattern_sequences.py).
Windows, and softmaxes over heads or channels, stay as they are. Attention whose weights
are read otherwise stays written out, and is marked (attention_weights.py): queries stay
sharded, keys and values are gathered once. Calls are read by what they mean, from a
softmax up to the scores and down to the values; every form that torch's Inductor folds
is a test. A log-sum-exp beside it becomes a result of the call.
"""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import torch
import torch.fx as fx
from torch.distributed.tensor import Shard

from cpcompile.ops.plain_attention import log_sum_exp, plain_attention
from cpcompile.ops.step.math_attention import accumulation_dtype

from ...flow.dim_rules import order_of
from ...graph.calls import spelled
from ...graph.context import PARAMETERS, Context, InputKind
from ...graph.effects import is_in_place, written_by
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_nodes,
    fake_mode_of,
    fake_value,
    insert_call,
    module_path,
    storage,
)
from ...graph.transforms import inside_transforms
from ..tokens.sequence_dims import SequenceDims
from .arrangement import Arranged
from .attention_weights import AttentionWithWeights, attention_with_weights, mark_rows
from .decompose_flex_attention import decompose_flex_attention
from .mask_of_terms import mask_of_terms
from .match_attention import SOFTMAX, attention_patterns
from .matched import AttentionPattern
from .other_users import release_scores
from .pattern_sequences import InputDim, is_over_sequence, over_sequences
from .unmatched import unmatched_softmaxes, why_left

log = logging.getLogger(__name__)

_Read = TypeVar("_Read", AttentionPattern, AttentionWithWeights)


@graph_pass(
    writes=(
        "unmatched_attention",
        "other_softmaxes",
        "row_parallel",
    )
)
def fold_attention_patterns(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite attention patterns over sequences; returns the number of calls.

    Raises: RewriteError for a block mask that only its blocks say.
    """
    decompose_flex_attention(graph)
    if any(spelled(node) in SOFTMAX for node in all_nodes(graph)):
        release_scores(graph)
    transformed = inside_transforms(graph)
    written = [x for x in attention_patterns(graph) if x.out not in transformed]
    with_weights = [
        x for x in attention_with_weights(graph) if x.softmax not in transformed
    ]
    folded = _over_sequences(graph, written, ctx)
    for call in folded:
        _fold(call)
        log.debug("attention at %s was written by hand", module_path(call.out))
    row_parallel = _over_sequences(graph, with_weights, ctx)
    for attention in row_parallel:
        mark_rows(attention)
    ctx.findings.row_parallel = [(x.softmax, why_left(x.softmax)) for x in row_parallel]
    parameters = {n for n, x in ctx.inputs.items() if x.kind in PARAMETERS}
    marked = {x.softmax for x in row_parallel}
    unmatched = [
        x for x in unmatched_softmaxes(graph, parameters) if x[0] not in marked
    ]
    if unmatched:
        activations = set(ctx.inputs) - parameters
        dims = SequenceDims(graph, [], fake_mode_of(graph), ctx.mesh, ctx.axis)
        for node, why in unmatched:
            if is_over_sequence(node, dims, activations):
                ctx.findings.unmatched_attention.append((node, why))
            else:
                ctx.findings.other_softmaxes.append(node)
    return len(folded) + len(row_parallel)


def _over_sequences(
    graph: fx.Graph, attentions: list[_Read], ctx: Context
) -> list[_Read]:
    """Keep attention over the sequence that is sharded, if it is known which one is."""
    if not attentions:
        return []
    activations = {n: x for n, x in ctx.inputs.items() if x.kind not in PARAMETERS}
    sharded = {
        InputDim(node, x.dim)
        for node, x in activations.items()
        if x.kind is InputKind.FULL and x.dim is not None
    }
    for node, x in activations.items():
        placement = x.placements[ctx.axis] if x.kind is InputKind.DTENSOR else None
        if isinstance(placement, Shard):
            sharded.add(InputDim(node, placement.dim))
    calls = over_sequences(
        graph,
        attentions,
        fake_mode_of(graph),
        ctx.mesh,
        ctx.axis,
        set(activations),
        sharded,
    )
    return [x for x in calls if not isinstance(x, AttentionPattern) or _can_fold(x)]


def _can_fold(call: AttentionPattern) -> bool:
    return _has_one_dtype(call) and not _is_overwritten(call)


def _has_one_dtype(call: AttentionPattern) -> bool:
    """Tell whether scores have the dtype of the result, or more digits.

    Under autocast they have that dtype. Models that upcast queries and keys have scores
    in float32, and values as they are.
    """
    q, k = fake_value(call.q.node).dtype, fake_value(call.k.node).dtype
    scores, out = (fake_value(x).dtype for x in (call.nodes[0], call.out))
    return q == k and scores in (q, out) and (scores == out or out.itemsize <= 2)


def _is_overwritten(call: AttentionPattern) -> bool:
    """Tell whether an operand changes between the first product and the last."""
    others = (x for _, x in (*call.terms, *call.scales))
    read = [x.node for x in (call.q, call.k, call.v, *others)]
    memory = {storage(x) for x in read} - {None}
    node = call.nodes[0]
    while node is not call.out:
        node = node.next
        called = node.op in ("call_function", "call_method")
        writes = called and is_in_place(node)
        if writes and memory & {storage(x) for x in written_by(node)}:
            return True
    return False


def _fold(call: AttentionPattern) -> None:
    out, graph = call.out, call.out.graph
    with graph.inserting_before(out):
        q, k, v = (x.insert(out) for x in (call.q, call.k, call.v))
        for term, x in call.scales:
            q = _scaled(q, x.insert(out), term.kind, out)
        dtype = fake_value(out).dtype
        scores = fake_value(call.nodes[0]).dtype
        if scores != dtype:  # in float32, of a model of another dtype
            v = _in_dtype(v, scores, out)
        kwargs: dict[str, Any] = {"scale": float(call.factor)}
        if call.cap:
            kwargs["softcap"] = float(call.cap)
        if call.dropout_p:
            kwargs["dropout_p"] = call.dropout_p
        if call.sinks is not None:
            kwargs["sinks"] = _flat(call.sinks, out)
        mask = mask_of_terms(call.terms, fake_value(q).dtype, out)
        if mask is not None:
            kwargs["attn_mask"] = mask
        shape = torch.broadcast_shapes(
            *(fake_value(x).shape[:-2] for x in (q, k, v)),
            () if mask is None else fake_value(mask).shape[:-2],
        )
        rows, columns = fake_value(q).shape[-2], fake_value(v).shape[-1]
        value = fake_value(out).new_empty((*shape, rows, columns), dtype=scores)
        if fake_value(out).requires_grad:
            value = value.requires_grad_()
        node = insert_call(
            graph, plain_attention, (q, k, v), like=out, value=value, kwargs=kwargs
        )
        if call.lse is not None:
            kwargs.pop("dropout_p", None)
            _replace_lse(call.lse, node, (q, k), kwargs)
        result = Arranged(node, (*call.q.labels[:-1], call.v.labels[-1]))
        if scores != dtype:
            result = Arranged(_in_dtype(node, dtype, out), result.labels)
        for how in call.after:
            result = result.regrouped(how)
        ordered = result.ordered(call.labels)
        assert ordered is not None, "the labels are the same"
        new = ordered.insert(out)
    out.replace_all_uses_with(new)
    if call.lse is not None:
        graph.erase_node(call.lse)
    for old in reversed(call.nodes):
        _erase(old)


def _scaled(q: fx.Node, by: fx.Node, kind: str, like: fx.Node) -> fx.Node:
    """Scale queries, in their dtype, by what scores are scaled by."""
    function = torch.div if kind == "divide" else torch.mul
    value = function(fake_value(q), fake_value(by))
    scaled = insert_call(like.graph, function, (q, by), like=like, value=value)
    dtype = fake_value(q).dtype
    return scaled if value.dtype == dtype else _in_dtype(scaled, dtype, like)


def _replace_lse(
    lse: fx.Node, attention: fx.Node, scored: tuple[fx.Node, ...], kwargs: Any
) -> None:
    """Replace a log-sum-exp by that of the attention.

    scored: the queries and keys of the attention.
    """
    old = fake_value(lse)
    value = old.to(accumulation_dtype(fake_value(attention).dtype))
    args = (attention, *scored)
    new = insert_call(
        lse.graph, log_sum_exp, args, like=attention, value=value, kwargs=kwargs
    )
    if value.dtype != old.dtype:
        new = _in_dtype(new, old.dtype, attention)
    lse.replace_all_uses_with(new)


def _in_dtype(node: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
    args, value = (node, dtype), fake_value(node).to(dtype)
    return insert_call(like.graph, torch.Tensor.to, args, like=like, value=value)


def _flat(sinks: fx.Node, like: fx.Node) -> fx.Node:
    value = fake_value(sinks)
    if value.ndim == 1:
        return sinks
    args, flat = (sinks, (-1,)), value.reshape(-1)
    return insert_call(like.graph, torch.reshape, args, like=like, value=flat)


def _erase(node: fx.Node) -> None:
    """Erase a node that nothing reads, and transposes that were for it alone."""
    before = node.all_input_nodes
    node.graph.erase_node(node)
    for source in before:
        if not source.users and order_of(source) is not None:
            _erase(source)
