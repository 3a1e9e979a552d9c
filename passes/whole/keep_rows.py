"""Keep tokens apart from what is flattened with them, row by row.

    view [B, S, H, D] -> [B*S*H, D]; norm of each row; view -> [B, S, H*D]
      ->
    norm of each row [B, S, H, D]; view -> [B, S, H*D]

Rows of batch, tokens and heads are no shard that DTensor knows. What follows such a
view runs on the dimensions as they were, as long as it treats every row by itself, or
reduces all of them. Another call reads a view of that.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_same, is_symbol
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import OpOverload

from ..graph.graph_pass import graph_pass
from .keep_products import VIEWS, call_like
from .uneven_views import joined_dims

aten = torch.ops.aten
_SUMS = (aten.sum.dim_IntList,)
_FEWEST = 3  # batch, tokens, and what else
_COPIES = (
    *(aten.clone.default, aten.alias.default, aten.detach.default),
    *(aten._to_copy.default, torch.ops.prims.convert_element_type.default),
)
# The place of the dimensions among their arguments.
_DIMS: dict[Any, int] = {
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.var_mean.correction: 1,
    aten.linalg_vector_norm.default: 2,
    aten._softmax.default: 1,
    aten._log_softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax_backward_data.default: 2,
    aten.slice.Tensor: 1,
    aten.split.Tensor: 2,
    aten.unsqueeze.default: 1,
    aten.squeeze.dims: 1,
}


@dataclass(frozen=True)
class _Rows:
    """A value whose rows are kept apart.

    node: of it. sizes: of what was flattened. behind: dimensions after them.
    """

    node: fx.Node
    sizes: tuple[Any, ...]
    behind: int

    @property
    def more(self) -> int:
        """Say how many dimensions there are more than flattened."""
        return len(self.sizes) - 1


@graph_pass()
def keep_rows(graph: fx.Graph, _: object) -> int:
    """Rewrite the calls on flattened rows; return how many."""
    known: dict[fx.Node, _Rows] = {}
    count = 0
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in VIEWS:
            source = known.get(node.args[0])
            if source is not None:
                _view(graph, node, source)
            elif (found := _flattened(graph, node)) is not None:
                known[node] = found
            continue
        with graph.inserting_before(node):
            if node.target in _SUMS and _is_sum_of_rows(graph, node, known):
                continue
            rows = _kept(graph, node, known)
        if rows is not None:
            known[node] = rows
            count += 1
    for node, rows in known.items():
        if node is not rows.node and node.target not in VIEWS and node.users:
            _flatten(graph, node, rows)
    graph.eliminate_dead_code()
    return count


def _is_sum_of_rows(
    graph: fx.Graph, node: fx.Node, known: dict[fx.Node, _Rows]
) -> bool:
    """Write a sum of rows, also where tokens are flattened with a batch behind them."""
    x: Any = node.args[0]
    rows = known.get(x)
    if rows is None and x.target in VIEWS:
        rows = _flattened(graph, x, _FEWEST - 1)
    return rows is not None and _sum(graph, node, rows)


def _flattened(graph: fx.Graph, view: fx.Node, fewest: int = _FEWEST) -> _Rows | None:
    """Return the rows that a view flattens, perhaps with a part of the channels."""
    source: Any = view.args[0]
    value = source.meta["val"]
    before, after = list(value.shape), list(view.meta["val"].shape)
    own, (first, *split) = next(iter(joined_dims(before, after)), ([], [0]))
    sizes = [before[d] for d in own]
    if split:
        behind = math.prod(after[d] for d in split)
        if is_symbol(sizes[-1]) or is_symbol(behind) or sizes[-1] % behind:
            return None
        sizes[-1] //= behind
    several = sum(not is_same(n, 1) for n in sizes) > 1
    if not several or len(sizes) < fewest:
        return None
    rows = source
    if split:
        shape = [*sizes, *after[1:]]
        args, apart = (source, shape), value.reshape(shape)
        with graph.inserting_before(view):
            rows = call_like(graph, aten.reshape.default, args, view, apart)
    return _Rows(rows, tuple(sizes), len(after) - first - 1)


def _view(graph: fx.Graph, node: fx.Node, source: _Rows) -> None:
    """View the rows that are kept apart; not possible in some orders of memory."""
    sizes = list(node.meta["val"].shape)
    try:
        source.node.meta["val"].view(sizes)
    except (RuntimeError, ValueError):
        return
    node.args = (source.node, sizes)


def _flatten(graph: fx.Graph, node: fx.Node, rows: _Rows) -> None:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return  # its parts are viewed
    with graph.inserting_after(rows.node):
        args = (rows.node, list(value.shape))
        flat = call_like(graph, aten.reshape.default, args, node, value)
    node.replace_all_uses_with(flat)


def _kept(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, _Rows]) -> _Rows | None:
    """Write a call on rows that are kept apart; None if it may not treat them so."""
    rows = [known[x] for x in node.all_input_nodes if x in known]
    if not rows or len({(x.sizes, x.behind) for x in rows}) > 1:
        return None
    first = rows[0]
    for x in node.all_input_nodes:
        if x not in known and x.target in VIEWS and _is_like(x, first):
            value = x.meta["val"].view([*first.sizes, *x.meta["val"].shape[1:]])
            like = (x.args[0], list(value.shape))
            new = call_like(graph, aten.reshape.default, like, x, value)
            known[x] = _Rows(new, first.sizes, first.behind)
    if node.target is operator.getitem:
        value = first.node.meta["val"][node.args[1]]
        new = call_like(graph, node.target, (first.node, node.args[1]), node, value)
        return _Rows(new, first.sizes, first.behind)
    args = _arguments(node, known, first)
    if args is None:
        return None
    with_rows = fx.node.map_arg(args, lambda x: known[x].node if x in known else x)
    try:
        values = fx.node.map_arg(with_rows, lambda x: x.meta["val"])
        value = node.target(*values, **node.kwargs)  # type: ignore[operator]
    except (RuntimeError, ValueError, IndexError):
        return None
    behind = _behind(node, value, first)
    if behind is None:
        return None
    new = call_like(graph, node.target, with_rows, node, value)
    new.kwargs = node.kwargs
    return _Rows(new, first.sizes, behind)


def _is_like(view: fx.Node, rows: _Rows) -> bool:
    """Tell whether a view, maybe of joined channels, has the rows of what it meets."""
    flat, value = math.prod(rows.sizes), view.meta["val"]
    return value.ndim == rows.behind + 1 and is_same(value.shape[0], flat)


def _sum(graph: fx.Graph, node: fx.Node, rows: _Rows) -> bool:
    """Write a sum over all rows, and perhaps more; return whether it is one."""
    ndim, keeps = rows.behind + 1, len(node.args) > 2 and bool(node.args[2])
    dims: Any = node.args[1]
    others = [d % ndim + rows.more for d in dims if d % ndim]
    if not dims or len(others) == len(dims):
        return False
    every = [*range(rows.more + 1), *others]
    value = node.meta["val"]
    new = call_like(graph, node.target, (rows.node, every), node, value)
    new.kwargs = node.kwargs
    if keeps:
        new.meta["val"] = value.squeeze([d % ndim for d in dims])
        args = (new, list(value.shape))
        new = call_like(graph, aten.view.default, args, node, value)
    node.replace_all_uses_with(new)
    return True


def _arguments(
    node: fx.Node, known: dict[fx.Node, _Rows], rows: _Rows
) -> tuple[Any, ...] | None:
    """Return the arguments of a call on rows that are kept apart."""
    target = node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    if any(isinstance(x, fx.Node) for x in pytree.tree_leaves(node.kwargs)):
        return None
    if pointwise or target in _COPIES:
        others = [x for x in node.all_input_nodes if x not in known]
        values = [x.meta["val"] for x in others]
        fits = all(isinstance(x, Tensor) and x.ndim <= rows.behind for x in values)
        return node.args if fits else None
    if target is aten.expand.default:
        sizes: Any = node.args[1]
        fits = len(sizes) == rows.behind + 1
        return (node.args[0], [*rows.sizes, *sizes[1:]]) if fits else None
    place = _DIMS.get(target)
    if place is None or len(node.args) <= place:
        return None
    args = list(node.args)
    dims: Any = args[place]
    ndim = rows.behind + 1 + (target is aten.unsqueeze.default)
    several = list(dims) if isinstance(dims, list | tuple) else [dims]
    if not several or any(d % ndim == 0 for d in several):
        return None
    found = [d % ndim + rows.more for d in several]
    args[place] = found if isinstance(dims, list | tuple) else found[0]
    return tuple(args)


def _behind(node: fx.Node, value: Any, rows: _Rows) -> int | None:
    """Return how many dimensions a result has behind the rows, if it has these."""
    flat = [x for x in pytree.tree_leaves(node.meta["val"]) if isinstance(x, Tensor)]
    found = [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
    behind = {x.ndim - 1 for x in flat}
    if len(flat) != len(found) or len(behind) != 1:
        return None
    for x, y in zip(flat, found, strict=True):
        wanted = [*rows.sizes, *x.shape[1:]]
        if len(wanted) != y.ndim or not all(map(is_same, wanted, y.shape)):
            return None
    return behind.pop()
