"""Rules for calls that sort rows, that use what is sorted, and that bring it back.

And for calls that make memory for sorted rows, or write or add rows there.

A rule is rule(region, node) -> kind; it raises NotByRows. All other calls have to be
proved row-wise by DTensor, see `DispatchRegion.row_wise`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.dispatch_calls import given, need, same_columns, tensors_read
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenDim
from .dispatch_region import DispatchRegion, DispatchRule
from .row_kinds import (
    CopiedRows,
    Counts,
    Ends,
    Fresh,
    Kinds,
    Order,
    Positions,
    SumOfTokens,
    TokenRows,
    WayBack,
)


def sort(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kinds of sorted keys and of which row each is; argsort has no keys."""
    keys, descending = given(node)["input"], given(node)["descending"]
    value = fake_value(keys)
    need(value.ndim == 1 and not value.is_floating_point())
    key_kind = region.kinds.get(keys)
    if isinstance(key_kind, Positions):  # the order of an order is the way back
        need(not key_kind.tokens and spelled(node) == "argsort")
        need(not descending)
        return WayBack(key_kind.order)
    kind = region.rows(keys)
    need(kind.order is None)
    order = Order(node, kind.per_token, ascending=descending is False)
    if spelled(node) == "argsort":
        return Positions(order, tokens=False)
    keys_in_order = TokenRows(kind.per_token, order, keys=not_negative(keys))
    return keys_in_order, Positions(order, tokens=False)


def not_negative(keys: fx.Node) -> bool:
    """Tell whether keys are unchanged indices of topk, max, sort or argmax, or checked.

    The check is cp::expert_numbers.
    """
    while keys.op in ("call_function", "call_method"):
        if fake_value(keys).dtype not in _EXACT:
            return False
        call = canonical_call(keys)
        if call.name in ("argmax", "cp::expert_numbers"):
            return True
        source = call.arguments.get("input")
        if not isinstance(source, fx.Node):
            return False
        if call.name == "getitem" and call.arguments["index"] == 1:
            return spelled(source) in ("topk", "max", "sort")
        if call.name not in _SAME_NUMBERS:
            return False
        keys = source
    return False


_SAME_NUMBERS = ("view", "reshape", "flatten", "contiguous", "to", "detach", "clone")


def checked(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of numbers of experts none of which is negative."""
    return region.rows(given(node)["numbers"])


def floor_divide(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of row positions // rows per token: the token of each row."""
    kind = region.kinds.get(given(node)["input"])
    divisor = given(node)["other"]
    if not isinstance(kind, Positions):
        return region.row_wise(node)
    need(not kind.tokens and divisor == kind.order.rows)
    if spelled(node) == "div":
        need(given(node).get("rounding_mode") in ("floor", "trunc"))
    return Positions(kind.order, tokens=True)


def select(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of x[index], or of one of several results."""
    source, index = given(node)["input"], given(node)["index"]
    source_kind = region.kinds.get(source)
    if isinstance(source_kind, tuple):
        need(isinstance(index, int))
        one: Kinds = source_kind[index]
        return one
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, fx.Node):
        return region.row_wise(node)
    return _at(region, source, index)


def _at(region: DispatchRegion, source: fx.Node, index: fx.Node) -> Kinds:
    """Return the kind of rows of `source` that are taken by their numbers."""
    kind = region.kinds.get(index)
    if isinstance(kind, Positions):
        order = kind.order
        row_kind = region.rows(source, 1 if kind.tokens else order.rows)
        need(row_kind.order is None)
        return TokenRows(order.rows, order)
    if isinstance(kind, WayBack):
        row_kind = region.rows(source)
        need(row_kind.order is kind.order)
        return TokenRows(kind.order.rows)
    need(fake_value(index).ndim == 1)
    need(fake_value(index).dtype in (torch.int64, torch.int32))
    numbers = region.rows(index)
    region.same(source)  # of an expert, say, by its number
    return TokenRows(numbers.per_token, numbers.order)


def index_select(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of rows taken along dimension 0.

    The call is torch.index_select, or gather with equal columns.
    """
    source, dim, index = (given(node)[name] for name in ("input", "dim", "index"))
    if isinstance(region.kinds.get(index), Positions | WayBack):
        need(dim == 0)
        if spelled(node) == "gather":
            same_columns(source, index)
        return _at(region, source, index)
    return region.row_wise(node)


def columns(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of a view that gives positions more, equal columns."""
    source = given(node)["input"]
    kind = region.kinds.get(source)
    if not isinstance(kind, Positions | WayBack):
        return region.row_wise(node)
    before, after = fake_value(source), fake_value(node)
    need(spelled(node) != "expand" or before.ndim == after.ndim)
    need(before.shape[0] == after.shape[0] and before.shape[1:].numel() == 1)
    return kind


def histogram(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of the number of rows that each expert has.

    The call is torch.histc between given limits.
    """
    x, low, high = (given(node)[name] for name in ("input", "min", "max"))
    need(isinstance(low, int | float) and isinstance(high, int | float) and low < high)
    kind = region.rows(x)
    region.counted(node, x, math.ceil(low) - 1)
    if not (kind.keys and kind.order and kind.order.ascending and low <= 0):
        return Counts(None)
    return Counts(kind.order)


def cumsum(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of summed counts: where the rows of each expert end."""
    kind = region.kinds.get(given(node)["input"])
    if not isinstance(kind, Counts):
        return region.row_wise(node)
    need(kind.order is not None and given(node)["dim"] in (0, -1))
    assert kind.order is not None
    return Ends(kind.order)


def cast(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of a value in another dtype.

    Numbers that the dtype has too keep their meaning.
    """
    kind = region.kinds.get(given(node)["input"])
    exact = fake_value(node).dtype in _EXACT and len(tensors_read(node)) == 1
    if isinstance(kind, Counts | Ends | Positions | WayBack):
        need(exact)
        return kind
    return (
        kind
        if isinstance(kind, TokenRows) and kind.keys and exact
        else region.row_wise(node)
    )


# Dtypes that have every number of an expert or a token.
_EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}


def grouped_product(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of products of each row with the matrix of its expert."""
    x, weight, *_ = given(node).values()  # each operation names them otherwise
    kind, where = region.rows(x), region.kinds.get(given(node)["offs"])
    need(isinstance(where, Ends) and kind.order is where.order)
    need(given(node).get("bias") is None and fake_value(weight).ndim == 3)
    region.same(weight)
    return TokenRows(kind.per_token, kind.order)


def repeat(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of a tensor that has every token several times.

    The call is repeat_interleave along dimension 0.
    """
    times = given(node)["repeats"]
    need(isinstance(times, int))
    x, dim = given(node)["input"], given(node)["dim"]
    need(dim == 0 or (dim is None and fake_value(x).ndim == 1))
    kind = region.rows(x)
    need(kind.order is None)
    return TokenRows(kind.per_token * times)


def copies(region: DispatchRegion, node: fx.Node) -> Kinds:
    """Return the kind of x.repeat(experts, 1): all tokens once for every expert."""
    x, (times, *others) = given(node)["input"], given(node)["repeats"]
    need(isinstance(times, int) and len(others) == fake_value(x).ndim - 1)
    need(all(n == 1 for n in others))
    region.rows(x, 1)
    need(region.kinds.get(x, TokenRows(1)) == TokenRows(1))
    return CopiedRows(TokenDim(0, outer=times))


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


RULES: dict[str, DispatchRule] = {
    "sort": sort,
    "argsort": sort,
    "floor_divide": floor_divide,
    "div": floor_divide,
    "getitem": select,
    "index_select": index_select,
    "gather": index_select,
    "unsqueeze": columns,
    "expand": columns,
    "view": columns,
    "reshape": columns,
    "histc": histogram,
    "cumsum": cumsum,
    "to": cast,
    "grouped_mm": grouped_product,
    "_grouped_mm": grouped_product,
    "transformers::grouped_mm_fallback": grouped_product,
    "empty_like": new_memory,
    "zeros_like": new_memory,
    "setitem": write_at,
    "scatter_": write_at,
    "scatter": write_at,
    "index_add_": add_at,
    "index_add": add_at,
    "scatter_add_": add_at,
    "scatter_add": add_at,
    "repeat_interleave": repeat,
    "repeat": copies,
    "cp::expert_numbers": checked,
}
