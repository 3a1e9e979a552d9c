"""Opens multi_head_attention_forward, so that the attention call in it can be found.

    out, weights = multi_head_attention_forward(query, key, value, 64, 4, ...)
      ->
    linear, chunk, view, transpose, ..., aten.scaled_dot_product_attention, ..., linear

nn.MultiheadAttention and nn.TransformerEncoder reach a backend as this one opaque node.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from cpcompile.passes.context import Context
from cpcompile.passes.graph import all_nodes, fake_value, insert_call


def inline_attention_modules(graph: fx.Graph, ctx: Context) -> int:
    """Inline every such node, also in checkpoint regions; returns their number."""
    nodes = [
        node
        for node in all_nodes(graph)
        if node.target is F.multi_head_attention_forward
    ]
    for node in nodes:
        _inline(node)
    return len(nodes)


def _inline(node: fx.Node) -> None:
    inputs = node.all_input_nodes
    values = [_global_fake(fake_value(x)) for x in inputs]

    def call(*tensors: Any) -> Any:
        replaced = dict(zip(inputs, tensors, strict=True))
        args = fx.map_arg(node.args, replaced.__getitem__)
        kwargs = fx.map_arg(node.kwargs, replaced.__getitem__)
        return F.multi_head_attention_forward(*args, **kwargs)  # type: ignore[arg-type]

    body = make_fx(call, pre_dispatch=True)(*values)
    body.graph.eliminate_dead_code()
    _splice(body, node, inputs)


def _splice(body: fx.GraphModule, node: fx.Node, inputs: list[fx.Node]) -> None:
    """Copy the nodes of `body` in front of `node` and let its results replace it."""
    graph = node.graph
    placeholders = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    results: Any = None
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "output":
                results = fx.map_arg(inner.args[0], copies.__getitem__)
            elif inner.op == "call_function":
                copies[inner] = insert_call(
                    graph,
                    inner.target,
                    fx.map_arg(inner.args, copies.__getitem__),
                    like=node,
                    value=inner.meta.get("val"),
                    kwargs=fx.map_arg(inner.kwargs, copies.__getitem__),
                )
            else:
                assert inner.op == "placeholder", f"unexpected {inner.op} {inner.name}"
    for user in list(node.users):
        assert user.target is operator.getitem, "the call returns (out, weights)"
        _replace(user, results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def _replace(node: fx.Node, by: fx.Node | None) -> None:
    """Let `by` stand for a node; None, for absent weights, only in the output."""
    for user in list(node.users):
        assert by is not None or user.op == "output", "weights were not computed"
        user.args = fx.node.map_aggregate(user.args, lambda a: by if a is node else a)


def _global_fake(value: Any) -> Any:
    """A plain fake tensor of the global shape: the trace is of the global program."""
    if not isinstance(value, DTensor):
        return value
    mode = pytree.tree_leaves(value.to_local())[0].fake_mode
    assert isinstance(mode, FakeTensorMode)
    with mode:
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
