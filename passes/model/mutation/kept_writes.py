"""Write rows into a DTensor that the caller keeps, such as a cache of keys and values.

    keys.index_copy_(2, positions, k)     keys S(2), k S(2)
      ->
    cp_write_rows(keys, k, 2, positions)  each rank writes what lies in its part

The part is memory of the caller: it is written in place, and nothing is gathered but
the new rows. Which rows lie in which part is known when the program runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.errors import RewriteError

from ...graph.calls import canonical_call
from ...graph.context import InputKind
from ...graph.new_call import NewCall
from ...graph.nodes import where
from ...placement.decisions import Plain
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_from_local
from ...placement.written_rows import rows_of_rank


def is_kept(known: GraphValues, base: fx.Node) -> bool:
    """Tell whether a value lies in an input that the caller keeps."""
    return _caller_input(known, base) is not None


def _caller_input(known: GraphValues, base: fx.Node) -> fx.Node | None:
    memory, inputs = known.storages.get(base), known.ctx.inputs.items()
    for node, given in inputs:
        kept = given.kind is InputKind.KEPT
        if kept and memory is not None and known.storages.get(node) == memory:
            return node
    return None


def kept_write(known: GraphValues, node: fx.Node, base: fx.Node) -> Plain:
    """Decide on an in-place call on an input that the caller keeps.

    Raises: RewriteError for writes that are not of whole rows along the sharded
    dimension, for rows that need a gradient, and if another view is written, or read
    later.
    """
    value = known.value(base)
    written_rows, name = _rows_written(known, node), _caller_input(known, base)
    if written_rows is None or value.placements.count(Shard(written_rows[0])) != 1:
        raise RewriteError(
            f"{node.name} at {where(node)} writes into {name}, a DTensor with "
            f"placements {value.placements} that the caller keeps; needed whole rows "
            "along a sharded dimension: index_copy_(dim, positions, rows), or an "
            "assignment with one index, a slice or a tensor of positions"
        )
    _refuse_views(known, node, base)
    dim, index, rows = written_rows
    if known.ctx.backward and getattr(known.value(rows), "requires_grad", False):
        raise RewriteError(
            f"{node.name} at {where(node)} writes rows that need a gradient into "
            f"{name}, which the caller keeps; needed torch.no_grad() around the "
            "call: a cache is for inference"
        )
    return Plain(NewCall(cp_write_rows, (base, rows, dim, index)))


def _refuse_views(known: GraphValues, node: fx.Node, base: fx.Node) -> None:
    """Raise RewriteError if another view of the memory is written, or read later.

    A view across the parts is a copy of what was there when it was made.
    """
    order = {x: number for number, x in enumerate(node.graph.nodes)}
    wholes = ("placeholder", cp_from_local, cp_write_rows)
    views = [
        x
        for x in order
        if known.storages.get(x) == known.storages.get(base)
        and order[x] < order[node]
        and x.op not in wholes
        and x.target not in wholes
        and (x is base or any(order[user] > order[node] for user in x.users))
    ]
    if views:
        raise RewriteError(
            f"{node.name} at {where(node)} writes into "
            f"{_caller_input(known, base)}, a DTensor that the caller keeps, "
            f"and {views[0].name}, a part of it, is written or read later; "
            "needed a write to the whole, and views that are made after it"
        )


def cp_write_rows(whole: DTensor, rows: Any, dim: int, index: Any) -> DTensor:
    """Write whole[..., index, ...] = rows in place, see rows_of_rank."""
    rows_here = rows_of_rank(whole, rows, dim, index)
    if rows_here is not None:
        whole._local_tensor.index_copy_(dim, *rows_here)
    return whole


def _rows_written(known: GraphValues, node: fx.Node) -> tuple[int, Any, Any] | None:
    """Return (dim, index, rows) of a write of whole rows along one dim, or None."""
    call = canonical_call(node)
    arguments = call.arguments
    base = known.value(node.args[0])
    if call.name == "index_copy_":
        return arguments["dim"] % base.ndim, arguments["index"], arguments["source"]
    if call.name != "setitem" or not isinstance(arguments["value"], fx.Node):
        return None
    index = arguments["index"]
    items = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [x for x in items if not isinstance(x, fx.Node)]:
        at = next(i for i, x in enumerate(items) if x is Ellipsis)
        missing = base.ndim - len(items) + 1
        items[at : at + 1] = [slice(None)] * missing
    partial = [i for i, x in enumerate(items) if x != slice(None)]
    if len(partial) != 1:
        return None
    (dim,) = partial
    item = items[dim]
    if isinstance(item, fx.Node):
        value = known.value(item)
        positions = isinstance(value, Tensor) and value.ndim == 1
        if not positions or value.dtype == torch.bool:
            return None
    elif not isinstance(item, slice) or fx.map_arg(item, str) != item:  # has nodes
        return None
    return dim, item, arguments["value"]
