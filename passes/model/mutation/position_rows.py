"""Write rows at positions that are data, in a form of which each rank can do its part.

    x[:, at] = value         x [B, S, C] S(1), at [k], value [B, k, C]
      ->
    mask, numbers = cp_written_at(x, 1, (at,)), cp_numbers_at(x, 1, (at,))    [S] each
    x = write_rows(x, mask, numbers, value, 1)

Mask and numbers are made by every rank, and cut as x is. So index_put, index_copy,
index_add, index_fill, and scatter of whole tokens are writes of rows like those under a
mask. Where one position is written several times the last row stays, which torch leaves
open; rows that are added are summed by position beforehand.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import is_same, is_symbol

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.decisions import Propagate
from ...placement.graph_values import GraphValues
from ...placement.placement_calls import cp_gather_keys, cp_replicate
from ...placement.token_positions import cp_numbers_at, cp_summed_at, cp_written_at
from ..moves.index_items import index_items
from ..moves.move_rules import split_dim
from .masked_rows import rows_written

FUNCTIONAL = (
    "index_put",
    "index_copy",
    "index_add",
    "index_fill",
    "scatter",
    "scatter_add",
)
WRITES_AT = tuple(f"{name}_" for name in FUNCTIONAL)


def assigned_rows(
    known: GraphValues, base: fx.Node, index: Any, value: Any, accumulate: bool = False
) -> Propagate | None:
    """Decide on base[index] = value, or +=, where positions of tokens are data.

    None if the index has other items than all of a dimension and, side by side, numbers
    and tensors of numbers, if it does not cut the tokens, or if ranks of another axis
    have not all rows of the value.
    """
    items, dim = index_items(index, fake_value(base).shape), split_dim(known, base)
    if items is None or dim is None:
        return None
    cut = [d for d, item in enumerate(items) if item != slice(None)]
    if not cut or not cut[0] <= dim <= cut[-1] or len(cut) != cut[-1] + 1 - cut[0]:
        return None
    items = items[cut[0] : cut[-1] + 1]
    block = _block(items)
    if block is None:
        return None
    return _written(known, base, cut[0], items, block, value, accumulate)


def _written(
    known: GraphValues,
    base: fx.Node,
    first: int,
    items: tuple[Any, ...],
    block: torch.Size,
    value: Any,
    accumulate: bool,
) -> Propagate | None:
    """Decide on a write at positions, of which there are `block` together."""
    behind = fake_value(base).ndim - first - len(items)
    rows = _rows(known, value, fake_value(base).shape, (first, behind), block)
    if rows is None:
        return None
    where, numbers = (base, first, items), None
    if isinstance(rows, NewCall):
        numbers = NewCall(cp_numbers_at, where)
        rows = NewCall(cp_summed_at, (*where, rows)) if accumulate else rows
    mask = NewCall(cp_written_at, where)
    return rows_written(known, base, mask, numbers, rows, first, accumulate, len(items))


def _block(items: tuple[Any, ...]) -> torch.Size | None:
    """Return the shape that positions have together; None if an item is none."""
    values = [fake_value(item) for item in items]
    tensors = [x for x in values if isinstance(x, Tensor)]
    if not tensors or not all(isinstance(x, int | Tensor) for x in values):
        return None
    if any(is_symbol(n) for x in tensors for n in x.shape):
        return None
    block: torch.Size = torch.broadcast_shapes(*(x.shape for x in tensors))
    return block


def _rows(
    known: GraphValues,
    value: Any,
    base: Sequence[Any],
    around: tuple[int, int],
    block: torch.Size,
) -> Any:
    """Return the call that makes rows [*A, rows, *R] of a value, or a number.

    base: the shape of what is written. around: how many dimensions A and R are.
    """
    if not isinstance(value, fx.Node):
        return value if isinstance(value, int | float) else None
    given, (first, behind) = known.value(value), around
    if not isinstance(given, Tensor):
        return given if isinstance(given, int | float) else None
    wanted = [*base[:first], *block, *base[len(base) - behind :]]
    missing, own = len(wanted) - given.ndim, fake_value(value).shape
    if missing < 0:
        return None
    rows = NewCall(cp_replicate, (value, known.cp_axis))
    if isinstance(given, DTensor):
        others = [
            p for axis, p in enumerate(given.placements) if axis != known.ctx.axis
        ]
        of_block = range(first - missing, first + len(block) - missing)
        if any(p.is_partial() or getattr(p, "dim", -1) in of_block for p in others):
            return None
        rows = NewCall(cp_gather_keys, (value, known.cp_axis))
    if missing or not all(map(is_same, own, wanted)):
        if any(map(is_symbol, wanted)):
            return None
        rows = NewCall(torch.Tensor.expand, (rows, wanted))
    if not block:
        return NewCall(torch.unsqueeze, (rows, first))
    if len(block) == 1:
        return rows
    return NewCall(torch.flatten, (rows, first, first + len(block) - 1))


def rows_at(known: GraphValues, node: fx.Node) -> Propagate | None:
    """Decide on index_put, index_copy, index_add, index_fill, scatter and scatter_add.

    Of the latter two, those that write whole tokens: positions are expanded.
    """
    call = canonical_call(node)
    given, name = call.arguments, call.name.removesuffix("_")
    base = given.get("input")
    if not isinstance(base, fx.Node):
        return None
    if name in ("scatter", "scatter_add"):
        return _scattered(known, base, given, name == "scatter_add")
    if name == "index_put":
        items = [slice(None) if x is None else x for x in given["indices"]]
        adds = bool(given["accumulate"])
        return assigned_rows(known, base, tuple(items), given["values"], adds)
    if not isinstance(given["dim"], int) or given.get("alpha", 1) != 1:
        return None
    before = (slice(None),) * (given["dim"] % fake_value(base).ndim)
    value = given["value" if name == "index_fill" else "source"]
    index = (*before, given["index"])
    return assigned_rows(known, base, index, value, name == "index_add")


def _scattered(
    known: GraphValues, base: fx.Node, given: dict[str, Any], adds: bool
) -> Propagate | None:
    """Decide on base.scatter(dim, index, source) of tokens [*A, S, *R]."""
    index, dim = fake_value(given["index"]), split_dim(known, base)
    source = given.get("src", given.get("value"))
    if dim is None or not index.ndim or given.get("reduce"):
        return None
    if given["dim"] % index.ndim != dim:
        return None
    block, others = index.shape[: dim + 1], [d for d in range(index.ndim) if d != dim]
    shape, written = fake_value(base).shape, fake_value(source)
    whole = all(is_same(index.shape[d], shape[d]) for d in others)
    fits = not isinstance(written, Tensor) or list(written.shape) == [*index.shape]
    if not whole or not fits or any(map(is_symbol, block)):
        return None
    behind = range(dim + 1, index.ndim)
    if any(index.stride(d) and not is_same(shape[d], 1) for d in behind):
        return None  # positions differ from channel to channel
    at = NewCall(operator.getitem, (given["index"], (..., *[0] * len(behind))))
    items = (*[None] * dim, at)
    return _written(known, base, 0, items, block, source, adds)
