"""Open multi_head_attention_forward, so that the attention call in it can be found.

    out, weights = multi_head_attention_forward(query, key, value, 64, 4, ...)
      ->
    linear, chunk, view, transpose, ..., aten.scaled_dot_product_attention, ..., linear

nn.MultiheadAttention and nn.TransformerEncoder reach a backend as this one opaque node;
without gradients an encoder layer in evaluation is one node as a whole. With
need_weights=True there is no attention call inside: products and a softmax are computed
by rows (fold_attention_patterns). Never raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_nodes, fake_mode_of, fake_value, insert_call, plain_fake


@graph_pass()
def inline_attention_modules(graph: fx.Graph, ctx: Context) -> int:
    """Inline attention modules, also in checkpoint regions; return their number."""
    bodies = (
        (F.multi_head_attention_forward, F.multi_head_attention_forward),
        (torch._transformer_encoder_layer_fwd, _encoder_layer),
    )
    calls = [
        (node, body)
        for node in all_nodes(graph)
        for target, body in bodies
        if node.target is target
    ]
    for node, body in calls:
        _inline(node, body)
    return len(calls)


def _encoder_layer(
    x_BSC: Tensor,
    embed_dim: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> Tensor:
    """Compute what torch._transformer_encoder_layer_fwd does, seen in torch 2.13.

    rest: weight and bias of the norms and of both linear layers, then a mask that is
    True where something is hidden, and its type: 0 is for pairs of tokens, 1 for keys
    [B, S], 2 for [B, H, S, S].
    """
    (g1, b1, g2, b2, w1, c1, w2, c2), (mask, mask_type) = _parts(rest)
    norms = ((g1, b1), (g2, b2))
    visible = None
    if mask is not None:
        visible = mask.to(torch.bool).logical_not()
        visible = visible[:, None, None] if mask_type == 1 else visible

    def attend(x_BSC: Tensor) -> Tensor:
        qkv = F.linear(x_BSC, qkv_weight, qkv_bias).unflatten(-1, (3, heads, -1))
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return F.linear(y.transpose(1, 2).flatten(2), out_weight, out_bias)

    def feed_forward(x_BSC: Tensor) -> Tensor:
        y = F.linear(x_BSC, w1, c1)
        return F.linear(F.gelu(y) if use_gelu else F.relu(y), w2, c2)

    for block, (weight, bias) in zip((attend, feed_forward), norms, strict=True):
        if norm_first:
            y = F.layer_norm(x_BSC, (embed_dim,), weight, bias, eps)
            x_BSC = x_BSC + block(y)
        else:
            y = x_BSC + block(x_BSC)
            x_BSC = F.layer_norm(y, (embed_dim,), weight, bias, eps)
    return x_BSC


def _parts(rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the eight weights, and the mask with its type or None twice."""
    return rest[:8], (*rest[8:], None, None)[:2]


def _inline(node: fx.Node, function: Callable[..., Any]) -> None:
    inputs = node.all_input_nodes
    values = [plain_fake(fake_value(x)) for x in inputs]

    def call(*tensors: Any) -> Any:
        replaced = dict(zip(inputs, tensors, strict=True))
        args = fx.map_arg(node.args, replaced.__getitem__)
        kwargs = fx.map_arg(node.kwargs, replaced.__getitem__)
        return function(*args, **kwargs)

    with fake_mode_of(node.graph):  # for the tensors that it makes itself
        body = make_fx(call, pre_dispatch=True)(*values)
    body.graph.eliminate_dead_code()
    _splice(body, node, inputs)


def _splice(body: fx.GraphModule, node: fx.Node, inputs: list[fx.Node]) -> None:
    """Copy the nodes of `body` before `node`, and let its results replace it."""
    graph = node.graph
    placeholders = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    results: Any = None
    made = fake_value(node)
    made = made if isinstance(made, tuple) else (made,)
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in made)
    with (
        graph.inserting_before(node),
        fake_mode_of(graph),
        torch.set_grad_enabled(trained),
    ):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = fx.map_arg(inner.args[0], copies.__getitem__)
            elif inner.op == "call_function":
                args, kwargs = fx.map_arg(
                    (inner.args, inner.kwargs), copies.__getitem__
                )
                given = fx.map_arg((args, kwargs), lambda x: plain_fake(fake_value(x)))
                # A trace does not say which values have a gradient.
                value = inner.target(*given[0], **given[1])
                copies[inner] = insert_call(
                    graph, inner.target, args, like=node, value=value, kwargs=kwargs
                )
            else:
                assert inner.op == "placeholder", f"unexpected {inner.op} {inner.name}"
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
        graph.erase_node(node)
        return
    for user in list(node.users):
        assert user.target is operator.getitem, "the call returns (out, weights)"
        _replace(user, results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _replace(node: fx.Node, by: fx.Node | None) -> None:
    """Let `by` replace a node; None, for absent weights, is for the output alone."""
    for user in list(node.users):
        assert by is not None or user.op == "output", "weights were not computed"
        user.args = fx.node.map_aggregate(user.args, lambda a: by if a is node else a)
