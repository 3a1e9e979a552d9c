"""Compute losses of flattened tokens on the tokens, where the rows are a symbol.

flatten = x.flatten(0, 1); loss = cross_entropy(flatten, t.flatten())   # x: [s0, 74, V]
  ->
movedim = movedim(x, -1, 1); loss = cross_entropy(movedim, t)           # [s0, V, 74]

DTensor has no placement for the tokens of a symbolic number of rows in one dimension.
Does nothing where the number of rows is known.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from cpcompile.geometry.lengths import is_same

from ...graph.calls import canonical_call, spelled
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.loss_calls import OF_CLASSES, loss_call
from ...graph.nodes import fake_value, insert_call

_VIEWS = ("view", "reshape", "flatten")


@graph_pass()
def unflatten_losses(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite the losses of classes; return how many."""
    if ctx.rows is None:
        return 0
    return sum(_unflatten(node) for node in list(graph.nodes))


def _unflatten(node: fx.Node) -> bool:
    loss = loss_call(node) if spelled(node) in OF_CLASSES else None
    if loss is None or loss.reduction == "none":
        return False
    scores, target = (_viewed(x) for x in (loss.input, loss.target))
    if scores is None or target is None or fake_value(loss.input).ndim != 2:
        return False
    value, classes = fake_value(scores), fake_value(target)
    sizes = (*classes.shape, fake_value(loss.input).shape[-1])
    if value.ndim != len(sizes) or not all(map(is_same, value.shape, sizes)):
        return False
    with node.graph.inserting_before(node):
        moved = insert_call(
            node.graph, torch.movedim, (scores, -1, 1), like=node,
            value=value.movedim(-1, 1),
        )  # fmt: skip
    node.replace_input_with(loss.input, moved)
    node.replace_input_with(loss.target, target)
    for view in (loss.input, loss.target):
        if not view.users:
            node.graph.erase_node(view)
    return True


def _viewed(node: fx.Node) -> fx.Node | None:
    if spelled(node) not in _VIEWS:
        return None
    source = canonical_call(node).arguments["input"]
    return source if isinstance(source, fx.Node) else None
