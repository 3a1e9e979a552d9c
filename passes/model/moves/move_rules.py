"""Decide on calls that move tokens: what changes its rank travels, and nothing else.

    getitem = x[:, 1:]                                  # x: [2, 16, 8] S(1)
      ->
    cp_move_tokens = cp_move_tokens([x], 1, 'slice', 1, None, None)   # [2, 15, 8] S(1)

A rule reads what a call does along the tokens. What it does along other dimensions
stays a call of its own, on the result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.geometry.lengths import expected, is_same, is_symbol
from cpcompile.geometry.token_pieces import sliced

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall
from ...graph.nodes import expected_shape, fake_value
from ...placement.decisions import Decision, Propagate, Replace
from ...placement.graph_values import GraphValues
from ...placement.token_moves import are_few, cp_move_tokens, cp_split_tokens
from ...placement.token_picks import cp_gather_at, cp_pick_tokens
from .index_items import index_items, place_of

_MOST_PICKS = 8
"""More picks of one value cost more messages than to gather it once."""
_ALL = slice(None)


def moved_tokens(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a call that moves tokens of a sharded sequence; None for others."""
    call = canonical_call(node)
    rule = RULES.get(call.name)
    if rule is None or not call.arguments:
        return None
    return rule(known, node, call.arguments)


def split_dim(known: GraphValues, x: Any) -> int | None:
    """Return the dimension along which the axis, and no other, splits a value."""
    value = known.value(x) if isinstance(x, fx.Node) else None
    if not isinstance(value, DTensor) or known.is_joint(value):
        return None
    placement = value.placements[known.ctx.axis]
    if type(placement) is not Shard or value.placements.count(placement) > 1:
        return None
    if any(p.is_partial() for p in value.placements):
        return None
    return int(placement.dim)


def _along_tokens(known: GraphValues, given: dict[str, Any]) -> int | None:
    """Return the dimension of a call's operand if it is that of the tokens."""
    x = given["input"]
    dim = split_dim(known, x)
    if dim is None or given["dim"] % fake_value(x).ndim != dim:
        return None
    return dim


def move_tokens(
    known: GraphValues, xs: Sequence[Any], dim: int, how: str, *args: Any, **kwargs: Any
) -> NewCall:
    """Return the call that moves the tokens of some values along a dimension."""
    return NewCall(cp_move_tokens, ([*xs], known.cp_axis, dim, how, *args), kwargs)


def _item(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, index = given["input"], given["index"]
    if not isinstance(x, fx.Node):
        return None
    dim = split_dim(known, x)
    if dim is None:
        return None
    items = index_items(index, fake_value(x).shape)
    if items is None:
        return None
    place = place_of(items, dim)
    item = items[place]
    if isinstance(item, slice):
        rest = (*items[:place], slice(None), *items[place + 1 :])
        if _takes_all(known, x, dim, item):  # the gradient would be gathered
            return _then(x, rest)
        sliced_x = _slice(known, x, dim, item)
        return None if sliced_x is None else _then(sliced_x, rest)
    return _picked(known, node, x, dim, items)


def _takes_all(known: GraphValues, x: fx.Node, dim: int, item: slice) -> bool:
    """Tell whether a slice has all entries of a dimension, as `[-S:]` may."""
    length, numbers = known.value(x).shape[dim], known.value(item)
    _, count = sliced(length, numbers.start, numbers.stop, numbers.step)
    return item != slice(None) and is_same(count, length)


def _then(x: fx.Node | NewCall, items: tuple[Any, ...]) -> Decision:
    """Return the decision to make a call, and to read items of what it gives."""
    if all(isinstance(item, slice) and item == slice(None) for item in items):
        return Replace(x)
    return Propagate(NewCall(operator.getitem, (x, items)))


def _slice(known: GraphValues, x: fx.Node, dim: int, item: slice) -> NewCall | None:
    """Return the call that cuts a sequence; None if it stays as it is."""
    length, numbers = known.value(x).shape[dim], known.value(item)
    _, count = sliced(length, numbers.start, numbers.stop, numbers.step)
    if is_same(count, length) or expected(count) == 0:
        return None
    if are_few(count, known.ctx.ranks):
        if _is_picked_often(x):
            return None
        return NewCall(cp_pick_tokens, (x, known.cp_axis, dim, _along(x, dim, item)))
    return move_tokens(known, [x], dim, "slice", item.start, item.stop, item.step)


def _picked(
    known: GraphValues, node: fx.Node, x: fx.Node, dim: int, items: tuple[Any, ...]
) -> Replace | None:
    """Decide on an index of tokens, which may be data."""
    value = known.value(x)
    if None in [i for i in items if not isinstance(i, fx.Node)]:
        return None
    if not all(p.is_replicate() for p in _others(known, value)):
        return None
    if any(is_split(known, item) for item in items) or _is_picked_often(x):
        return None
    size, whole = (math.prod(expected_shape(v)) for v in (fake_value(node), value))
    if isinstance(fake_value(items[dim]), Tensor) and 2 * size > whole:
        return None  # nearly all of the sequence
    return Replace(NewCall(cp_pick_tokens, (x, known.cp_axis, dim, items)))


def _others(known: GraphValues, value: DTensor) -> list[Any]:
    return [p for i, p in enumerate(value.placements) if i != known.ctx.axis]


def is_split(known: GraphValues, x: Any) -> bool:
    """Tell whether ranks have parts of a value, or summands of it."""
    value = known.value(x) if isinstance(x, fx.Node) else None
    return isinstance(value, DTensor) and not all(
        p.is_replicate() for p in value.placements
    )


def _is_picked_often(x: fx.Node) -> bool:
    """Tell whether single tokens of a value are read again and again."""
    picks = [
        user
        for user in x.users
        if canonical_call(user).name in ("getitem", "select", "narrow")
    ]
    return len(picks) > _MOST_PICKS


def _narrow(
    known: GraphValues, node: fx.Node, given: dict[str, Any]
) -> Decision | None:
    x, dim = given["input"], _along_tokens(known, given)
    start, length = given["start"], given["length"]
    if dim is None:
        return None
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        return None
    call = _slice(known, x, dim, slice(start, start + length))
    return None if call is None else Replace(call)


def _select(
    known: GraphValues, node: fx.Node, given: dict[str, Any]
) -> Decision | None:
    x, dim = given["input"], _along_tokens(known, given)
    if dim is None or not isinstance(given["index"], int):
        return None
    return _picked(known, node, x, dim, _along(x, dim, given["index"]))


def _along(x: fx.Node, dim: int, item: Any) -> tuple[Any, ...]:
    """Return an item for every dimension, all of each but one."""
    after = fake_value(x).ndim - 1 - dim
    return (*[slice(None)] * dim, item, *[slice(None)] * after)


def _index_select(
    known: GraphValues, node: fx.Node, given: dict[str, Any]
) -> Decision | None:
    x, dim = given["input"], _along_tokens(known, given)
    if dim is None:
        return None
    picked = _picked(known, node, x, dim, _along(x, dim, given["index"]))
    if picked is None or fake_value(given["index"]).ndim:
        return picked
    return Replace(NewCall(torch.unsqueeze, (picked.by, dim)))  # one, but a dimension


def _gather(
    known: GraphValues, node: fx.Node, given: dict[str, Any]
) -> Decision | None:
    x, index = given["input"], given["index"]
    dim = _along_tokens(known, given)
    if dim is None:
        return None
    value = known.value(x)
    if not all(p.is_replicate() for p in _others(known, value)):
        return None
    picked = (expected_shape(fake_value(index)) or (1,))[dim]  # (): one of a vector
    if is_split(known, index) or 2 * picked > expected_shape(value)[dim]:
        return None
    return Replace(NewCall(cp_gather_at, (x, known.cp_axis, dim, index)))


def _roll(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, dim = given["input"], split_dim(known, given["input"])
    shifts, dims = _list(given["shifts"]), _list(given["dims"])
    if dim is None or not dims or not all(isinstance(n, int) for n in shifts):
        return None
    ndim = fake_value(x).ndim
    shift = sum(n for n, d in zip(shifts, dims, strict=True) if d % ndim == dim)
    rest = [(n, d) for n, d in zip(shifts, dims, strict=True) if d % ndim != dim]
    if len(rest) == len(dims):
        return None
    moved = move_tokens(known, [x], dim, "roll", shift)
    if not rest:
        return Replace(moved)
    return Propagate(NewCall(torch.roll, (moved, *map(list, zip(*rest, strict=True)))))


def _flip(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, dim = given["input"], split_dim(known, given["input"])
    if dim is None:
        return None
    ndim = fake_value(x).ndim
    dims = [d % ndim for d in _list(given["dims"])]
    if dim not in dims:
        return None
    moved, rest = move_tokens(known, [x], dim, "flip"), [d for d in dims if d != dim]
    return Propagate(NewCall(torch.flip, (moved, rest))) if rest else Replace(moved)


def _pad(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, dim = given["input"], split_dim(known, given["input"])
    if dim is None:
        return None
    pad, mode, value = list(given["pad"]), given.get("mode", "constant"), given["value"]
    place = 2 * (fake_value(x).ndim - 1 - dim)
    if place >= len(pad) or not any(pad[place : place + 2]):
        return None
    if not all(isinstance(n, int) for n in pad):
        return None
    fill = _as_float(0.0 if value is None else value)
    if fill is None:
        return None
    before, after = pad[place : place + 2]
    if mode != "constant" and min(before, after) < 0:
        return None  # what is cut off is not repeated
    if are_few(known.value(x).shape[dim] + before + after, known.ctx.ranks):
        return None
    moved = move_tokens(known, [x], dim, "pad", before, after, mode, fill=fill)
    pad[place : place + 2] = 0, 0
    if not any(pad):
        return Replace(moved)
    return Propagate(NewCall(F.pad, (moved, pad, mode, value)))


def _cat(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    return joined(known, [*given["tensors"]], given["dim"])


def joined(known: GraphValues, tensors: list[Any], along: Any) -> Decision | None:
    """Decide on torch.cat: sharded sequences are joined where they lie."""
    found = (split_dim(known, x) for x in tensors)
    dims = {dim for dim in found if dim is not None}
    values = known.value(tensors)
    if len(dims) != 1 or not all(isinstance(x, Tensor) for x in values):
        return None
    (dim,) = dims
    if along % fake_value(tensors[0]).ndim != dim or _differ(known, values, dim):
        return None
    return Replace(move_tokens(known, tensors, dim, "cat"))


def _differ(known: GraphValues, values: Sequence[Tensor], dim: int) -> bool:
    """Tell whether sources of one sequence have not one dtype, or lie differently."""
    axis = known.ctx.axis
    if len({x.dtype for x in values}) > 1:
        return True
    placed = [x.placements for x in values if isinstance(x, DTensor)]
    ours = [x for x in placed if x[axis] == Shard(dim)]
    whole = [p for x in placed if x[axis] != Shard(dim) for p in x]
    return any(x != ours[0] for x in ours) or not all(p.is_replicate() for p in whole)


def _diff(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, dim = given["input"], _along_tokens(known, given)
    if dim is None or given["n"] != 1:
        return None
    if given["prepend"] is not None or given["append"] is not None:
        return None
    value = known.value(x)
    if value.dtype == torch.bool or are_few(value.shape[dim] - 1, known.ctx.ranks):
        return None
    later = move_tokens(known, [x], dim, "slice", 1, None, 1)
    earlier = move_tokens(known, [x], dim, "slice", None, -1, 1)
    return Replace(NewCall(torch.sub, (later, earlier)))


def assigned_tokens(
    known: GraphValues, base: fx.Node, part: Any, index: Any
) -> tuple[NewCall, Any] | None:
    """Return the call for base[index] = part, where the index has a range of tokens.

    One token is a range, too, in which the part has no dimension of tokens.

    Returns: the tokens of base, and None; or those of base[channels], and `channels`,
        an index of all tokens. None if it is no such assignment.
    """
    value, part_value = known.value(base), known.value(part)
    ndim = value.ndim
    items = index_items(index, value.shape)
    if items is None or not isinstance(part_value, Tensor | int | float):
        return None
    cut = [d for d, x in enumerate(items) if not (isinstance(x, slice) and x == _ALL)]
    if len(cut) == 1 and isinstance(items[cut[0]], int):
        call = _written_token(known, base, part, cut[0], items[cut[0]])
        return None if call is None else (call, None)
    if not all(isinstance(item, slice) for item in items):
        return None
    missing = ndim - getattr(part_value, "ndim", ndim)
    dim, of_part = split_dim(known, base), split_dim(known, part)
    if dim is None and not isinstance(value, DTensor) and of_part is not None:
        dim = of_part + missing  # a new tensor that is filled
    others = [d for d in cut if d != dim]
    if dim is None or dim not in cut or missing < 0:
        return None
    if others and not isinstance(value, DTensor):
        return None
    region = [_length(known, n, x) for n, x in zip(value.shape, items, strict=True)]
    channels: Any = None
    source: fx.Node | NewCall = base
    if others:
        channels = tuple(x if d in others else _ALL for d, x in enumerate(items))
        source = NewCall(operator.getitem, (base, channels))
    item = items[dim]
    place = (dim, "assign", item.start, item.stop, item.step)
    if not isinstance(part_value, Tensor):
        fill = _as_float(part)
        filled = (
            None if fill is None else move_tokens(known, [source], *place, fill=fill)
        )
        return None if filled is None else (filled, channels)
    if of_part != dim - missing and is_split(known, part):
        return None
    if part_value.dtype != value.dtype:
        part = NewCall(torch.Tensor.to, (part, value.dtype))
    if list(part_value.shape) != region:
        part = NewCall(torch.Tensor.expand, (part, region))
    return move_tokens(known, [source, part], *place), channels


def _length(known: GraphValues, size: int, item: slice) -> int:
    """Return how many entries a slice has of a dimension."""
    numbers = known.value(item)
    return sliced(size, numbers.start, numbers.stop, numbers.step).length


def _written_token(
    known: GraphValues, base: fx.Node, part: Any, dim: int, token: int
) -> NewCall | None:
    """Return the call for base[:, token] = part."""
    value, part_value = known.value(base), known.value(part)
    if split_dim(known, base) != dim or is_split(known, part):
        return None
    place = (dim, "assign", token, token + 1 or None, 1)
    if not isinstance(part_value, Tensor):
        fill = _as_float(part)
        return None if fill is None else move_tokens(known, [base], *place, fill=fill)
    row = [n for d, n in enumerate(value.shape) if d != dim]
    if part_value.ndim > len(row):
        return None
    if part_value.dtype != value.dtype:
        part = NewCall(torch.Tensor.to, (part, value.dtype))
    if list(part_value.shape) != row:
        part = NewCall(torch.Tensor.expand, (part, row))
    return move_tokens(known, [base, NewCall(torch.unsqueeze, (part, dim))], *place)


def _as_float(number: Any) -> float | None:
    """Return a number of a program as a float; None if that is another number."""
    if not isinstance(number, int | float):
        return None
    try:
        same = float(number)
    except OverflowError:
        return None
    return same if same == number or same != same else None


def _list(x: Any) -> list[Any]:
    return list(x) if isinstance(x, list | tuple) else [x]


def _split(known: GraphValues, node: fx.Node, given: dict[str, Any]) -> Decision | None:
    x, dim = given["input"], split_dim(known, given["input"])
    if dim is None or given.get("dim", 0) % fake_value(x).ndim != dim:
        return None
    sizes = [part.shape[dim] for part in fake_value(node)]
    few = [size for size in sizes if are_few(size, known.ctx.ranks)]
    if any(map(is_symbol, sizes)) or len(few) > _MOST_PICKS:
        return None
    return Propagate(NewCall(cp_split_tokens, (x, known.cp_axis, dim, sizes)))


RULES: dict[str, Callable[[GraphValues, fx.Node, dict[str, Any]], Decision | None]] = {
    "getitem": _item,
    "narrow": _narrow,
    "select": _select,
    "index_select": _index_select,
    "gather": _gather,
    "diff": _diff,
    "roll": _roll,
    "flip": _flip,
    "pad": _pad,
    "cat": _cat,
    **dict.fromkeys(("split", "chunk", "tensor_split", "split_with_sizes"), _split),
}
