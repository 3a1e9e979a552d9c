"""Find the attention calls of a graph and read their arguments.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      ->  AttentionCall(node=out, q=q, k=k, v=v, is_causal=True, scale=0.125, ...)

Calls inside activation-checkpoint regions are found as well. `inline_attention_modules`
runs before, so that calls inside of multi_head_attention_forward are visible here.
Operators take [B, H, S, D], and torch any number of leading dimensions, which it
broadcasts. Calls of three or four dimensions that agree, or with one key head, stay:

    attention(q [B, F, H, S, D], k [B, F, H, S, D], v)
      ->
    attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, (B, F))

A call that is `unsupported` (a mask together with is_causal=True, dropout of 1, heads
that cannot be grouped, a transform of torch.func around it) raises where its tokens are
shared out (refuse_attention), or is gathered if not strict. One that is `already_local`
is right as it is: it is sharded on heads or batch alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import LengthNotSymbolic, is_same, is_symbol
from cpcompile.ops.plain_attention import log_sum_exp
from cpcompile.ranks.shardings import is_sequence_sharded, placements_text

from ...graph.attention_calls import attention_operands, is_attention
from ...graph.calls import canonical_call, set_argument
from ...graph.context import AttentionCall, Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import (
    all_nodes,
    expected_shape,
    fake_value,
    has_unknown_size,
    insert_call,
    module_path,
)
from ...graph.transforms import inside_transforms
from .find_windows import find_windows

log = logging.getLogger(__name__)


@graph_pass(writes=("calls",))
def find_attention(graph: fx.Graph, ctx: Context) -> int:
    """Fill `findings.calls`, in the order of execution; returns their number.

    Raises: LengthNotSymbolic, see `align`.
    """
    transformed = inside_transforms(graph)
    nodes = [x for x in all_nodes(graph) if is_attention(x)]
    for node in nodes:
        if node not in transformed and already_local(node) is None:
            align(node)
    ctx.findings.calls = [_read(node, node in transformed) for node in nodes]
    find_windows(graph, ctx)
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


def align(node: fx.Node) -> None:
    """Rewrite one attention call if its operands have another form.

    Raises: LengthNotSymbolic if a batch dimension is a symbol, and not of all operands.
    """
    arguments = canonical_call(node).arguments
    names = ("query", "key", "value")
    values = {name: fake_value(arguments[name]) for name in names}
    before = [tuple(x.shape[:-2]) for x in values.values()]
    ndim = max(4, *(x.ndim for x in values.values()))
    shapes = [(1,) * (ndim - 2 - len(x)) + x for x in before]
    batches = [x[:-1] for x in shapes]
    if any(is_symbol(n) for x in batches for n in x):
        if ndim > 4 or not all(is_same(*x, *batches[0]) for x in batches):
            raise LengthNotSymbolic(f"a batch dimension of {node.name} is a symbol")
        batch = batches[0]
    else:
        batch = tuple(torch.broadcast_shapes(*batches))
    q_heads, *others = (int(n) for *_, n in shapes)
    kv_heads, mask = max(others), arguments["attn_mask"]
    masked = isinstance(mask, fx.Node) and isinstance(fake_value(mask), Tensor)
    mask_shape: tuple[int, ...] = tuple(fake_value(mask).shape) if masked else ()
    if {*others} - {1, kv_heads} or len(mask_shape) > ndim:
        return  # torch broadcasts it to no form, and says so
    heads = dict.fromkeys(names, kv_heads) | {"query": max(q_heads, kv_heads)}
    wanted = {name: (*batch, n) for name, n in heads.items()}
    if before in ([*wanted.values()], [(heads["query"],)] * 3) and len(batch) == 1:
        return
    with node.graph.inserting_before(node):
        if len(mask_shape) > 3 and len(batch) > 1:
            wanted["attn_mask"] = (*batch, mask_shape[-3])
        for name, shape in wanted.items():
            set_argument(node, name, _aligned(arguments[name], shape, node))
    _restore(node, batch, ndim)


def _aligned(operand: fx.Node, wanted: tuple[int, ...], like: fx.Node) -> fx.Node:
    """Reshape an operand to [all batches, heads, tokens, dim]."""
    for _ in range(len(wanted) + 2 - fake_value(operand).ndim):
        operand = _insert(torch.unsqueeze, operand, 0, like=like)
    if tuple(fake_value(operand).shape[:-2]) != wanted:
        sizes = (*wanted, -1, -1)
        operand = _insert(torch.Tensor.expand, operand, *sizes, like=like)
    if len(wanted) > 2:
        operand = _insert(torch.flatten, operand, 0, len(wanted) - 2, like=like)
    return operand


def _restore(node: fx.Node, batch: tuple[int, ...], ndim: int) -> None:
    """Give the result of a call that was aligned the dimensions that it had."""
    result: Tensor = fake_value(node)
    missing = ndim - result.ndim
    node.meta["example_value"] = result[(None,) * missing].flatten(0, ndim - 4)
    if not missing and len(batch) == 1:
        return
    with node.graph.inserting_after(node):
        if missing:
            out = _insert(torch.squeeze, node, tuple(range(missing)), like=node)
        else:
            out = _insert(torch.unflatten, node, 0, batch, like=node)
    node.replace_all_uses_with(out, delete_user_cb=lambda user: user is not out)


def _insert(target: Any, operand: fx.Node, *rest: Any, like: fx.Node) -> fx.Node:
    value, args = target(fake_value(operand), *rest), (operand, *rest)
    return insert_call(like.graph, target, args, like=like, value=value)
