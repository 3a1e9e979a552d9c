"""Keep batch and tokens apart in products.

    mm(view(x, [B*S, K]), w)           ->  view(linear(x, w), [B*S, N])
    mm(t(view(dy, [B*S, N])), view(x)) ->  weight_gradient(dy, x)

AOTAutograd flattens them, and a shard of tokens cannot be flattened with the batch
(cpcompile.ops.unflattened_linear). A view that follows and undoes the flattening goes,
also behind a bias. Where products of a batch flatten tokens, batched_products does so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from cpcompile.ops.unflattened_linear import LINEAR, WEIGHT_GRADIENT

from ..graph.graph_pass import graph_pass
from .batched_products import VIEWS, call_like, keep_batched

aten = torch.ops.aten
_TRANSPOSES = (aten.t.default, aten.permute.default, aten.transpose.int)


@graph_pass()
def keep_products(graph: fx.Graph, _: object) -> int:
    """Rewrite the products of flattened tokens; return how many."""
    for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
        _take_apart(graph, node)
    count = 0
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        a, b = node.args
        rows = _unflattened(a)
        if rows is not None:
            _write_linear(graph, node, rows, b)
            count += 1
        elif a.target in _TRANSPOSES:
            grad, x = _unflattened(a.args[0]), _unflattened(b)
            if grad is not None and x is not None:
                with graph.inserting_before(node):
                    value = node.meta["val"]
                    new = call_like(graph, WEIGHT_GRADIENT, (grad, x), node, value)
                node.replace_all_uses_with(new)
                count += 1
    count += keep_batched(graph)
    graph.eliminate_dead_code()
    return count


def _take_apart(graph: fx.Graph, node: fx.Node) -> None:
    """Write bias + product for an addmm without factors."""
    if node.kwargs:
        return
    bias, *factors = node.args
    value = node.meta["val"]
    with graph.inserting_before(node):
        product = call_like(graph, aten.mm.default, tuple(factors), node, value)
        total = call_like(graph, aten.add.Tensor, (product, bias), node, value)
    node.replace_all_uses_with(total)
    graph.erase_node(node)


def _write_linear(graph: fx.Graph, node: fx.Node, rows: fx.Node, weight: Any) -> None:
    """Write the product of rows that are not flattened, and a bias that is added."""
    flat = node.meta["val"]
    shape = [*rows.meta["val"].shape[:-1], flat.shape[-1]]
    value = flat.new_empty(shape)
    with graph.inserting_before(node):
        new = call_like(graph, LINEAR, (rows, weight), node, value)
    added = next(iter(node.users)) if len(node.users) == 1 else None
    if added is not None and _adds_a_row(added, node):
        with graph.inserting_before(added):
            new = call_like(graph, aten.add.Tensor, (new, added.args[1]), added, value)
        node = added
    for user in list(node.users):
        if user.target in VIEWS and list(user.meta["val"].shape) == shape:
            user.replace_all_uses_with(new)
    with graph.inserting_after(new):
        args = (new, list(flat.shape))
        flattened = call_like(graph, aten.view.default, args, node, flat)
    node.replace_all_uses_with(flattened)


def _adds_a_row(node: fx.Node, product: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.args[0] is not product:
        return False
    other = node.args[1]
    if node.kwargs or not isinstance(other, fx.Node):
        return False
    return bool(other.meta["val"].ndim == 1)


def _unflattened(x: Any) -> fx.Node | None:
    """Return what x [n, K] is a view of, if that is [.., K] with more dimensions."""
    if not isinstance(x, fx.Node) or x.target not in VIEWS:
        return None
    source: Any = x.args[0]
    sizes, flat = source.meta["val"].shape, x.meta["val"].shape
    flattens = len(flat) == 2 and len(sizes) > 2 and sizes[-1] == flat[-1]
    return source if flattens else None
