"""Compute attention by rows, on purpose, where something else reads its weights too.

    weights = softmax(matmul(q, k.mT));  out = matmul(weights, v);  return out, weights
      ->
    queries = constraint(q, OWN_ROWS, 2);  keys = constraint(k.mT, ALL_ROWS, 3)
    weights = softmax(matmul(queries, keys))
    out = matmul(weights, constraint(v, ALL_ROWS, 2));  return out, weights

All weights of a query have to be on one rank, and no operator of ours gives them. So
each rank computes the rows of its queries, once, from its own queries and all keys and
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.nodes import all_nodes, fake_value, insert_call
from ...graph.sequence_tokens import Wanted, constraint
from .arrangement import DimLabels
from .match_attention import SOFTMAX, WITHOUT_LAST, Weights, next_weights, read_softmax
from .products import Product, read_product
from .scores import read_scores


@dataclass(frozen=True)
class Operand:
    """An argument of a product, with its dimension of tokens."""

    product: fx.Node
    node: fx.Node
    dim: int


@dataclass(frozen=True)
class AttentionWithWeights:
    """Attention whose weights something else reads too.

    queries, keys: operands of the scores. values: those of every product with the
    weights.
    """

    softmax: fx.Node
    queries: Operand
    keys: Operand
    values: tuple[Operand, ...]

    @property
    def tokens(self) -> tuple[tuple[fx.Node, int], ...]:
        """Queries, keys and values, each with its dimension of tokens."""
        operands = (self.queries, self.keys, *self.values)
        return tuple((x.node, x.dim) for x in operands)


def attention_with_weights(graph: fx.Graph) -> Iterator[AttentionWithWeights]:
    """Yield every attention that can be computed by rows, but not folded, in order.

    Its weights are read otherwise too, or its scores have no form that is known.
    """
    for node in all_nodes(graph):
        if spelled(node) in SOFTMAX and read_softmax(node) is None:
            attention = _read(node)
            if attention is not None:
                yield attention


def mark_rows(attention: AttentionWithWeights) -> None:
    """Mark in the graph which operand is cut, and which are needed whole."""
    _mark(attention.queries, Wanted.OWN_ROWS)
    for operand in (attention.keys, *attention.values):
        _mark(operand, Wanted.ALL_ROWS)


def _mark(x: Operand, wanted: Wanted) -> None:
    if x.node.target is constraint and x.node.args[1:] == (wanted, x.dim):
        return
    graph, value = x.product.graph, fake_value(x.node)
    with graph.inserting_before(x.product):
        args = (x.node, wanted, x.dim)
        marked = insert_call(graph, constraint, args, like=x.product, value=value)
    x.product.replace_input_with(x.node, marked)


def _read(softmax: fx.Node) -> AttentionWithWeights | None:
    arguments = canonical_call(softmax).arguments
    source, dim = arguments.get("input"), arguments.get("dim")
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    scores = read_scores(source, softmax)
    if scores is None or scores.product.left is scores.product.right:
        return None
    first, keys, node = scores.product, scores.labels[dim], scores.nodes[0]
    k = _operand(node, first, keys)
    if k is None:
        return None
    q_labels, k_labels = first.left_labels, first.right_labels
    if k.node is first.left:
        q_labels, k_labels = k_labels, q_labels
    own = [x for x in first.out_labels if x in q_labels and x not in k_labels]
    q = _operand(node, first, own[-1]) if own else None
    weights = Weights((softmax,), scores.labels, scores.shape)
    values = tuple(_values(weights, keys))
    return (
        None if q is None or not values else AttentionWithWeights(softmax, q, k, values)
    )


def _operand(node: fx.Node, product: Product, label: str) -> Operand | None:
    """Return the operand that alone has a label; None if both have it, or neither."""
    sides = [
        Operand(node, x, labels.index(label))
        for x, labels in _sides(product)
        if label in labels
    ]
    return sides[0] if len(sides) == 1 else None


def _sides(product: Product) -> tuple[tuple[fx.Node, DimLabels], ...]:
    return (
        (product.left, product.left_labels),
        (product.right, product.right_labels),
    )


def _values(weights: Weights, keys: str) -> Iterator[Operand]:
    """Yield the operands that the weights are multiplied with, over the keys."""
    node = weights.nodes[-1]
    for user in node.users:
        product = read_product(user)
        if product is None:
            following = _following(weights, user)
            if following is not None:
                yield from _values(following, keys)
            continue
        sides = _sides(product)
        mine = [labels for x, labels in sides if x is node]
        other_sides = [(x, labels) for x, labels in sides if x is not node]
        if len(mine) != 1:
            continue
        ((other, labels),) = other_sides
        label = mine[0][weights.labels.index(keys)]
        if label in product.summed and label in labels:
            yield Operand(user, other, labels.index(label))


def _following(weights: Weights, user: fx.Node) -> Weights | None:
    """Return the weights after a call, with or without a column of sinks."""
    call = canonical_call(user)
    if call.name == "getitem" and call.arguments["index"] == WITHOUT_LAST:
        shape = (*weights.shape[:-1], weights.shape[-1] - 1)
        return replace(weights.then(user), shape=shape)
    return next_weights(weights, user)
