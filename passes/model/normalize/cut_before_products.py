"""Cut the operand of a product that widens it, in place of the product's result.

    logits = linear(hidden, weight)  # [B, S, V] from [B, S, D]
    shifted = logits.float()[..., :-1, :]
      ->
    shifted = linear(hidden[:, :-1], weight).float()

Losses of the next token cut logits. If nothing else reads these, the tokens that change
their rank by the cut may as well be cut while they are D numbers wide, not V. Between
product and loss there is no movement then, so that they run in tiles together; and of
`logits[:, -1:]` only what is read is computed.

Legend: B batch, S tokens, D width, V vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...flow.dim_maps import Axes
from ...flow.dim_rules import dim_map, product_map
from ...graph.calls import canonical_call, function_of
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import expected_shape, fake_mode_of, fake_value, insert_call
from ...graph.sequence_tokens import TokenAxis

LEAST_WIDENING = 2  # elements of the result per element of the operand


@dataclass(frozen=True)
class _Cut:
    """Which entries of dimension `dim` are kept."""

    dim: int
    kept: slice

    def index(self, dim: int) -> tuple[slice, ...]:
        """Return the index that keeps these entries of another dimension."""
        return (*[slice(None)] * dim, self.kept)


@graph_pass()
def cut_before_products(graph: fx.Graph, ctx: Context) -> int:
    """Move cuts before products that widen what is cut; return how many values."""
    moved = 0
    for node in reversed(list(graph.nodes)):
        cuts = [_cut(user) for user in node.users]
        if not cuts or cuts[0] is None or any(cut != cuts[0] for cut in cuts):
            continue
        cone = _cone(graph, node, cuts[0].dim)
        if cone is not None:
            _move(graph, node, cuts[0], *cone)
            moved += 1
    if moved:
        graph.lint()
    return moved


def _cut(node: fx.Node) -> _Cut | None:
    """Return the cut that a call is: one slice of one dimension, and no other index."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not _is_plain(source):
        return None
    call = canonical_call(node)
    if call.name == "narrow":
        start, length = call.arguments["start"], call.arguments["length"]
        if not isinstance(start, int) or not isinstance(length, int) or start < 0:
            return None
        dim, ndim = call.arguments["dim"], fake_value(source).dim()
        return _Cut(dim % ndim, slice(start, start + length))
    if call.name != "getitem":
        return None
    index = call.arguments["index"]
    items = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(x, slice) and x is not Ellipsis for x in items):
        return None
    cutting = [i for i, x in enumerate(items) if x not in (slice(None), Ellipsis)]
    if len(cutting) != 1:
        return None
    kept = items[cutting[0]]
    bounds = (kept.start, kept.stop, kept.step)
    if any(x is not None and not isinstance(x, int) for x in bounds):
        return None
    at = cutting[0]
    if Ellipsis in items[:at]:
        at += fake_value(source).dim() - len(items)
    return _Cut(at, kept)


def _is_plain(node: fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _cone(
    graph: fx.Graph, value: fx.Node, dim: int
) -> tuple[list[fx.Node], dict[fx.Node, int]] | None:
    """Return the calls from a product to `value`, in order, and what they read.

    Nothing but each other and cuts reads the calls. What they read is given with the
    dimension to be cut. None: there is no product that widens.
    """
    dims, cone, read = {value: dim}, list[fx.Node](), dict[fx.Node, int]()
    factors = set[fx.Node]()
    tokens = expected_shape(fake_value(value))[dim]
    nodes = list(graph.nodes)
    for node in reversed(nodes[: nodes.index(value) + 1]):
        if node not in dims:
            continue
        inside = node is value or (
            node not in factors and all(user in cone for user in node.users)
        )
        operands = _operands(node, dims[node], tokens) if inside else None
        if operands is None:
            read[node] = dims[node]
            continue
        if product_map(node) is not None or canonical_call(node).name == "linear":
            if dims[node] == fake_value(node).dim() - 1:
                return None  # of the weight, which is nobody's tokens
            factors.update(operands)
        cone.append(node)
        for operand, axis in operands.items():
            if dims.setdefault(operand, axis.dim) != axis.dim:
                return None
    sizes = [expected_shape(fake_value(x)) for x in (value, *read)]
    result, *others = (math.prod(x) for x in sizes)
    if not factors or result < LEAST_WIDENING * sum(others):
        return None
    return cone[::-1], read


def _operands(node: fx.Node, dim: int, tokens: int) -> Axes | None:
    """Return the operands of a call that have the entries of a dimension of its result.

    None if the call does not treat entries one by one.
    """
    if node.op not in ("call_function", "call_method") or not _is_plain(node):
        return None
    call_map = dim_map(node)
    if call_map is None or call_map.is_view or call_map.draws:
        return None
    axes = call_map.before(node, TokenAxis(dim), tokens)
    if not axes or any(x != TokenAxis(x.dim) for x in axes.values()):
        return None
    return axes if all(map(_is_plain, axes)) else None


def _move(
    graph: fx.Graph,
    value: fx.Node,
    cut: _Cut,
    cone: list[fx.Node],
    read: Mapping[fx.Node, int],
) -> None:
    """Cut what the calls of a cone read, and not their last result."""
    entries: dict[fx.Node, fx.Node] = {}
    with fake_mode_of(graph), torch.set_grad_enabled(fake_value(value).requires_grad):
        for node in cone:
            for operand in node.all_input_nodes:
                if operand not in read:
                    continue
                if operand not in entries:
                    index = cut.index(read[operand])
                    with graph.inserting_before(node):
                        entries[operand] = insert_call(
                            graph,
                            operator.getitem,
                            (operand, index),
                            like=node,
                            value=fake_value(operand)[index],
                        )
                node.replace_input_with(operand, entries[operand])
            args, kwargs = fx.map_arg((node.args, node.kwargs), fake_value)
            node.meta["example_value"] = function_of(node)(*args, **kwargs)
    for user in list(value.users):
        user.replace_all_uses_with(value, propagate_meta=False)
        graph.erase_node(user)
