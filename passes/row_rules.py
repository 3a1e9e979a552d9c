"""The calls that sort rows, that use what is sorted, and that bring it back.

A rule is rule(region, node) -> kind; it raises NotByRows. All other calls have to be
proved row-wise by DTensor, see `Region.visit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.lengths import is_symbol
from cpcompile.passes.graph import fake_value
from cpcompile.passes.row_kinds import (
    Counts,
    Ends,
    Fresh,
    Kinds,
    Order,
    Positions,
    Rows,
    Sum,
    WayBack,
)

if TYPE_CHECKING:
    from cpcompile.passes.row_region import Region


class NotByRows(Exception):
    """The rows of tokens meet, or nobody can tell."""


def call_name(node: fx.Node) -> str:
    """The name of what is called, whether function, method or overload."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[-1]
    return target if isinstance(target, str) else target.__name__


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument by position or name; sizes are numbers."""
    if len(node.args) > position:
        return number(node.args[position])
    return number(node.kwargs.get(name, default))


def number(x: Any) -> Any:
    """The value of a node that gives a size which is no symbol; x if it is not one."""
    value = fake_value(x)
    if not isinstance(x, fx.Node) or not isinstance(value, int | torch.SymInt):
        return x
    return x if is_symbol(value) else int(value)


def tensors_read(node: fx.Node) -> list[fx.Node]:
    """The inputs of a call, but for sizes."""
    return [x for x in node.all_input_nodes if isinstance(number(x), fx.Node)]


def need(condition: object) -> None:
    """Raise NotByRows unless it holds."""
    if not condition:
        raise NotByRows


def sort(region: Region, node: fx.Node) -> Kinds:
    """(keys in order, which row each is)."""
    keys = argument(node, 0, "input")
    value = fake_value(keys)
    need(value.ndim == 1 and not value.is_floating_point())
    known = region.kinds.get(keys)
    if isinstance(known, Positions):  # the order of an order is the way back
        need(not known.tokens and call_name(node) == "argsort")
        need(not argument(node, 2, "descending", False))
        return WayBack(known.order)
    kind = region.rows(keys)
    need(kind.order is None)
    descending = argument(node, 2, "descending", False)
    order = Order(node, kind.per_token, ascending=descending is False)
    if call_name(node) == "argsort":
        return Positions(order, tokens=False)
    keys_in_order = Rows(kind.per_token, order, keys=_are_numbers(keys))
    return keys_in_order, Positions(order, tokens=False)


def _are_numbers(keys: fx.Node) -> bool:
    """Whether keys come of topk or argmax, so that none is negative."""
    while keys.op in ("call_function", "call_method"):
        name, source = call_name(keys), keys.args[0] if keys.args else None
        if name == "argmax":
            return True
        if not isinstance(source, fx.Node):
            return False
        if name == "getitem" and keys.args[1] == 1:
            return call_name(source) in ("topk", "max", "sort")
        if name not in _SAME_NUMBERS:
            return False
        keys = source
    return False


_SAME_NUMBERS = {
    "view", "reshape", "flatten", "contiguous", "to", "int", "long", "detach", "clone",
}  # fmt: skip


def floor_divide(region: Region, node: fx.Node) -> Kinds:
    """The token of each row."""
    kind = region.kinds.get(argument(node, 0, "input"))
    divisor = argument(node, 1, "other")
    if not isinstance(kind, Positions):
        return region.row_wise(node)
    need(not kind.tokens and divisor == kind.order.rows)
    rounding = node.kwargs.get("rounding_mode", "floor")
    need(rounding in ("floor", "trunc"))
    return Positions(kind.order, tokens=True)


def select(region: Region, node: fx.Node) -> Kinds:
    """x[index], or one of several results."""
    source = argument(node, 0, "input")
    index = argument(node, 1, "index")
    known = region.kinds.get(source)
    if isinstance(known, tuple):
        assert isinstance(index, int)
        return known[index]
    if isinstance(index, tuple) and len(index) == 1:
        (index,) = index
    if not isinstance(index, fx.Node):
        return region.row_wise(node)
    return _at(region, source, index)


def _at(region: Region, source: fx.Node, index: fx.Node) -> Kinds:
    """Rows of `source` by their numbers."""
    kind = region.kinds.get(index)
    if isinstance(kind, Positions):
        order = kind.order
        found = region.rows(source, 1 if kind.tokens else order.rows)
        need(found.order is None)
        return Rows(order.rows, order)
    if isinstance(kind, WayBack):
        found = region.rows(source)
        need(found.order is kind.order)
        return Rows(kind.order.rows)
    need(fake_value(index).ndim == 1)
    need(fake_value(index).dtype in (torch.int64, torch.int32))
    numbers = region.rows(index)
    region.same(source)  # of an expert, say, by its number
    return Rows(numbers.per_token, numbers.order)


def index_select(region: Region, node: fx.Node) -> Kinds:
    """torch.index_select along dimension 0, and gather with equal columns."""
    source, dim = argument(node, 0, "input"), argument(node, 1, "dim")
    index = argument(node, 2, "index")
    if isinstance(region.kinds.get(index), Positions | WayBack):
        need(dim == 0)
        if call_name(node) == "gather":
            _same_columns(source, index)
        return _at(region, source, index)
    return region.row_wise(node)


def _same_columns(rows: fx.Node, index: fx.Node) -> None:
    """Positions are one number per row, so that their columns are equal."""
    need(fake_value(index).shape[1:] == fake_value(rows).shape[1:])


def columns(region: Region, node: fx.Node) -> Kinds:
    """Views that give positions more, equal columns."""
    kind = region.kinds.get(node.args[0])  # type: ignore[arg-type]
    if not isinstance(kind, Positions | WayBack):
        return region.row_wise(node)
    before, after = fake_value(node.args[0]), fake_value(node)
    need(before.shape[0] == after.shape[0] and before.shape[1:].numel() == 1)
    return kind


def histogram(region: Region, node: fx.Node) -> Kinds:
    """torch.histc between given limits: how many rows each expert has."""
    x = argument(node, 0, "input")
    low, high = argument(node, 2, "min", 0), argument(node, 3, "max", 0)
    need(isinstance(low, int | float) and isinstance(high, int | float) and low < high)
    kind = region.rows(x)
    if not (kind.keys and kind.order and kind.order.ascending and low <= 0):
        return Counts(None)
    return Counts(kind.order)


def cumsum(region: Region, node: fx.Node) -> Kinds:
    """Where the rows of each expert end."""
    kind = region.kinds.get(argument(node, 0, "input"))
    if not isinstance(kind, Counts):
        return region.row_wise(node)
    need(kind.order is not None and argument(node, 1, "dim") in (0, -1))
    assert kind.order is not None
    return Ends(kind.order)


def cast(region: Region, node: fx.Node) -> Kinds:
    """Another dtype: what has a meaning keeps it."""
    kind = region.kinds.get(node.args[0])  # type: ignore[arg-type]
    if isinstance(kind, Rows) and kind.keys:
        return kind
    if isinstance(kind, Counts | Ends | Positions | WayBack):
        return kind
    return region.row_wise(node)


def grouped_product(region: Region, node: fx.Node) -> Kinds:
    """Each row with the matrix of its expert."""
    x, weight = node.args[:2]
    ends = argument(node, 2, "offs")
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    kind, where = region.rows(x), region.kinds.get(ends)
    need(isinstance(where, Ends) and kind.order is where.order)
    need(node.kwargs.get("bias") is None and fake_value(weight).ndim == 3)
    region.same(weight)
    return Rows(kind.per_token, kind.order)


def new_memory(region: Region, node: fx.Node) -> Kinds:
    """Like positions or rows, to be written into."""
    source = node.args[0]
    kind = region.kinds.get(source)  # type: ignore[arg-type]
    need(isinstance(kind, Positions | Rows))
    need(fake_value(source).shape == fake_value(node).shape)
    rows = kind.per_token if isinstance(kind, Rows) else kind.order.rows  # type: ignore[union-attr]
    return Fresh(rows, zero=call_name(node) == "zeros_like")


def write_at(region: Region, node: fx.Node) -> Kinds:
    """base[positions] = rows: every row of base is written, once."""
    by_index = call_name(node) == "setitem"
    base = argument(node, 0, "input")
    index = argument(node, 1 if by_index else 2, "index")
    rows = argument(node, 2 if by_index else 3, "src")
    where = region.kinds.get(index) if isinstance(index, fx.Node) else None
    if not isinstance(where, Positions):
        return region.row_wise(node)
    need(not where.tokens and (by_index or argument(node, 1, "dim") == 0))
    need(by_index or fake_value(base).shape == fake_value(index).shape)
    need(region.fresh(base, where.order.rows) is not None)
    numbers = region.fresh(rows, where.order.rows)
    if numbers is not None:
        need(numbers.ascending)
        return WayBack(where.order)
    need(region.rows(rows).order is where.order)
    return Rows(where.order.rows)


def add_at(region: Region, node: fx.Node) -> Kinds:
    """index_add and scatter_add along dimension 0, into zeros."""
    base, index = argument(node, 0, "input"), argument(node, 2, "index")
    rows = argument(node, 3, "src" if "scatter" in call_name(node) else "source")
    need(argument(node, 1, "dim") == 0 and node.kwargs.get("alpha", 1) == 1)
    where = region.kinds.get(index)
    if not isinstance(where, Positions):  # per expert: a sum over the tokens
        numbers, values = region.rows(index), region.rows(rows)
        need(numbers.order is values.order and numbers.per_token == values.per_token)
        need(region.zeros(base))
        return Sum()
    if "scatter" in call_name(node):
        _same_columns(rows, index)
    kind = region.rows(rows)
    need(kind.order is where.order)
    per_token = 1 if where.tokens else where.order.rows
    made = region.fresh(base, per_token)
    need(made is not None and made.zero)
    return Rows(per_token)


def repeat(region: Region, node: fx.Node) -> Kinds:
    """repeat_interleave along dimension 0: every token several times."""
    x, times = argument(node, 0, "input"), argument(node, 1, "repeats")
    dim = argument(node, 2, "dim", 0 if fake_value(x).ndim == 1 else None)
    need(isinstance(times, int) and dim == 0)
    kind = region.rows(x)
    need(kind.order is None)
    return Rows(kind.per_token * times)


Rule = Callable[["Region", fx.Node], Kinds]

RULES: dict[str, Rule] = {
    "sort": sort,
    "argsort": sort,
    "floordiv": floor_divide,
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
    "float": cast,
    "int": cast,
    "long": cast,
    "grouped_mm": grouped_product,
    "_grouped_mm": grouped_product,
    "grouped_mm_fallback": grouped_product,
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
}


def made_memory(node: fx.Node) -> Fresh | None:
    """What a call that makes memory of given sizes has; per_token is its first size."""
    value = fake_value(node)
    if node.op not in ("call_function", "call_method") or not isinstance(value, Tensor):
        return None
    name = call_name(node)
    if name == "arange" and len(node.args) == 1 and value.ndim == 1:
        return Fresh(int(value.shape[0]), ascending=True)
    known = ("empty", "zeros", "new_empty", "new_zeros", "empty_like", "zeros_like")
    if name not in known or not value.ndim:
        return None
    return Fresh(int(value.shape[0]), zero="zeros" in name)
