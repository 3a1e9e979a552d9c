"""Rules for calls that make memory for sorted rows, or write or add rows there."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ...graph.calls import spelled
from ...graph.dispatch_calls import given, need, same_columns
from ...graph.nodes import fake_value
from .dispatch_region import DispatchRegion
from .row_kinds import Fresh, Kinds, Positions, SumOfTokens, TokenRows, WayBack


def new_memory(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of memory like positions or rows, to be written into."""
    source = given(node)["input"]
    kind = region.kinds.get(source)
    need(isinstance(kind, Positions | TokenRows))
    need(fake_value(source).shape == fake_value(node).shape)
    rows = kind.per_token if isinstance(kind, TokenRows) else kind.order.rows  # type: ignore[union-attr]
    return Fresh(rows, zero=spelled(node) == "zeros_like")


def write_at(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of base[positions] = rows.

    Every row of base is written, once.
    """
    by_index, named = spelled(node) == "setitem", given(node)
    base, index = named["input"], named["index"]
    rows: Any = named.get("value" if by_index else "src")
    where = region.kinds.get(index) if isinstance(index, fx.Node) else None
    if not isinstance(where, Positions):
        return region.row_wise(node)
    need(not where.tokens and (by_index or named["dim"] == 0))
    need(by_index or fake_value(base).shape == fake_value(index).shape)
    need(named.get("reduce") is None)
    need(region.fresh(base, where.order.rows) is not None)
    numbers = region.fresh(rows, where.order.rows)
    if numbers is not None:
        need(numbers.ascending)
        return WayBack(where.order)
    need(region.rows(rows).order is where.order)
    return TokenRows(where.order.rows)


def add_at(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of index_add or scatter_add along dimension 0, into zeros."""
    named = given(node)
    base, index = named["input"], named["index"]
    rows = named["src" if "scatter" in spelled(node) else "source"]
    need(named["dim"] == 0 and named.get("alpha", 1) == 1)
    where = region.kinds.get(index)
    if not isinstance(where, Positions):  # per expert: a sum over the tokens
        numbers, values = region.rows(index), region.rows(rows)
        need(numbers.order is values.order and numbers.per_token == values.per_token)
        need(region.zeros(base))
        region.counted(node, rows, 0)
        return SumOfTokens()
    if "scatter" in spelled(node):
        same_columns(rows, index)
    kind = region.rows(rows)
    need(kind.order is where.order)
    per_token = 1 if where.tokens else where.order.rows
    memory = region.fresh(base, per_token)
    need(memory is not None and memory.zero)
    return TokenRows(per_token)
