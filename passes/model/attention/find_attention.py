"""Find the attention calls of a graph and read their arguments.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      ->  AttentionCall(node=out, q=q, k=k, v=v, is_causal=True, scale=0.125, ...)

Calls inside activation-checkpoint regions are found as well. `inline_attention_modules`
runs before, so that calls inside of multi_head_attention_forward are visible here.

A call that is `unsupported` (a mask together with is_causal=True, dropout of 1, heads
that cannot be grouped, a transform of torch.func around it) raises where its tokens are
shared out (refuse_attention), or is gathered if not strict. One that is `already_local`
is right as it is: it is sharded on heads or batch alone.
"""

from __future__ import annotations

import logging

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.ops.plain_attention import log_sum_exp
from cpcompile.ranks.shardings import is_sequence_sharded, placements_text

from ...graph.attention_calls import is_attention
from ...graph.calls import canonical_call
from ...graph.context import AttentionCall, Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_nodes,
    expected_shape,
    fake_value,
    has_unknown_size,
    module_path,
)
from ...graph.transforms import inside_transforms

log = logging.getLogger(__name__)


@graph_pass(writes=("calls",))
def find_attention(graph: fx.Graph, ctx: Context) -> int:
    """Fill `findings.calls`, in the order of execution; returns their number."""
    transformed = inside_transforms(graph)
    ctx.findings.calls = [
        _read(node, node in transformed)
        for node in all_nodes(graph)
        if is_attention(node)
    ]
    for call in ctx.findings.calls:
        if call.already_local:
            log.info("attention at %s is left alone: %s", call.path, call.already_local)
    return len(ctx.findings.calls)


def unplanned_calls(ctx: Context) -> dict[fx.Node, AttentionCall]:
    """Return calls that an obstacle keeps as they are.

    Their tokens may be shared out all the same.
    """
    return {
        c.node: c for c in ctx.findings.calls if c.unsupported and not c.already_local
    }


def attention_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return the query, key and value of an attention call, however they are passed."""
    arguments = canonical_call(node).arguments
    q, k, v = (arguments[name] for name in ("query", "key", "value"))
    assert isinstance(q, fx.Node) and isinstance(k, fx.Node) and isinstance(v, fx.Node)
    return q, k, v


def _read(node: fx.Node, transformed: bool) -> AttentionCall:
    arguments = canonical_call(node).arguments
    q, k, v = attention_operands(node)
    mask, scale = arguments["attn_mask"], fake_value(arguments["scale"])
    call = AttentionCall(
        node=node,
        q=q,
        k=k,
        v=v,
        mask=mask if isinstance(mask, fx.Node) else None,
        dropout_p=float(fake_value(arguments["dropout_p"])),
        is_causal=bool(fake_value(arguments["is_causal"])),
        scale=default_scale(fake_value(q)) if scale is None else float(scale),
        path=module_path(node),
        q_shape=expected_shape(fake_value(q)),
        k_shape=expected_shape(fake_value(k)),
        dtype=fake_value(node).dtype,
        softcap=arguments.get("softcap") or 0.0,
        sinks=arguments.get("sinks"),
        score_mod=arguments.get("score_mod") or "",
        values=arguments.get("values"),
        lse=next((x for x in node.users if x.target is log_sum_exp), None),
    )
    grouped = bool(fake_value(arguments["enable_gqa"]))
    why_not = _IN_TRANSFORM if transformed else _unsupported(call, grouped)
    return AttentionCall(
        **call.__dict__
        | {
            "unsupported": why_not,
            "already_local": already_local(node),
        }
    )


def default_scale(q: Tensor) -> float:
    """Return the scale that torch takes where none is given.

    Without columns any scale serves, as all scores are 0.
    """
    return float(max(q.shape[-1], 1) ** -0.5)


_IN_TRANSFORM = (
    "got a call inside of a transform of torch.func, vmap or grad, which changes what "
    "its dimensions are; needed a call outside: attention takes batch dimensions"
)


def _unsupported(call: AttentionCall, grouped: bool) -> str | None:
    q, k, v = (fake_value(x) for x in (call.q, call.k, call.v))
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not 0 <= call.dropout_p < 1:
        return f"got dropout_p={call.dropout_p}; needed a probability in [0, 1)"
    if call.mask is not None and call.is_causal:
        return (
            "got attn_mask and is_causal=True, of which torch's kernels use both, or "
            "refuse them; needed one: write the causal limit into the mask"
        )
    if not (q.ndim == k.ndim == v.ndim) or q.ndim not in (3, 4):
        return f"got {shapes}; needed [batch, heads, tokens, dim] for all three"
    if k.shape[-2] != v.shape[-2]:
        return f"got {shapes}; needed as many values as keys"
    if q.shape[0] != k.shape[0] or k.shape[:-1] != v.shape[:-1]:
        return f"got {shapes}; needed equal batches, and k and v alike: expand them"
    if q.ndim == 4 and not _heads_agree(q, k, grouped):
        return f"got {shapes}; needed a multiple of the key heads as query heads"
    return None


def _heads_agree(q: Tensor, k: Tensor, grouped: bool) -> bool:
    if k.shape[1] in (1, q.shape[1]):
        return True
    return grouped and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0


def already_local(node: fx.Node) -> str | None:
    """Explain why a call needs no rewriting; None if it may need it.

    A DTensor call that is split over heads or batch, and not on the sequence, needs
    none. What has a size that only data tells, as images that are chosen by a mask, is
    the same on every rank.
    """
    operands = [fake_value(x) for x in attention_operands(node)]
    if has_unknown_size(operands):
        return "only data tells a size of q, k and v, which are whole on every rank"
    if not all(isinstance(x, DTensor) for x in operands):
        return None
    if any(is_sequence_sharded(x, x.ndim - 2) for x in operands):
        return None
    if not any(any(p.is_shard() for p in x.placements) for x in operands):
        return None
    placements = ", ".join(placements_text(x) for x in operands)
    return f"q, k, v have placements {placements}, and none is split on the sequence"
