"""Find the softmaxes of attention that was not folded, without changing them.

    scores = matmul(q, k) * scale          of two activations, not of a weight
    weights = dropout(softmax(scores))
    matmul(weights, v)

It is only reported to the user: DTensor computes it, and gathers the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.effects import view_of
from ...graph.nodes import all_nodes, reached

NOT_KNOWN = "it is of no form that is known"
_PRODUCTS = frozenset(
    {"matmul", "bmm", "baddbmm", "mm", "addmm", "einsum", "linear", "conv1d", "conv2d",
     "conv3d", "bilinear"}
)  # fmt: skip
_SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
# Calls between scores and softmax, and between softmax and values, in addition to views
# and calls that torch tags as pointwise (of some no overload is known).
_BETWEEN = frozenset(
    {"add", "sub", "mul", "div", "masked_fill", "where", "tanh", "clamp", "clone",
     "to", "_to_copy", "dropout", "native_dropout", "_unsafe_view", "cat"}
)  # fmt: skip

_Step = Callable[[fx.Node], Iterable[fx.Node]]


def unmatched_softmaxes(
    graph: fx.Graph, parameters: set[fx.Node]
) -> list[tuple[fx.Node, str]]:
    """Return the softmax of every attention written by hand, and why it is left."""
    return [
        (node, why_left(node))
        for node in all_nodes(graph)
        if spelled(node) in _SOFTMAX
        and any(
            not parameters & {*_through(product.all_input_nodes, _before)}
            for product in _products(node.all_input_nodes, _before)
        )
        and any(_products(node.users, _after))
    ]


def why_left(softmax: fx.Node) -> str:
    """Explain why attention is not folded."""
    node = softmax
    while len(node.users) == 1:
        (node,) = node.users
        if is_product(node):
            return NOT_KNOWN
    return "its weights are read more than once"


def is_product(node: fx.Node) -> bool:
    """Tell whether a call multiplies matrices."""
    return spelled(node) in _PRODUCTS


def _before(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def _after(node: fx.Node) -> Iterable[fx.Node]:
    return node.users


def _products(start: Iterable[fx.Node], step: _Step) -> list[fx.Node]:
    """Return the products that are reached from these nodes."""
    return [*filter(is_product, _through(start, step))]


def _through(start: Iterable[fx.Node], step: _Step) -> dict[fx.Node, None]:
    """Return what is reached through pointwise calls and views, their ends included."""
    return reached(start, lambda x: step(x) if _is_between(x) else ())


def _is_between(node: fx.Node) -> bool:
    overload = canonical_call(node).overload
    is_pointwise = overload is not None and torch.Tag.pointwise in overload.tags
    return spelled(node) in _BETWEEN or view_of(node) is not None or is_pointwise
