"""Rules for calls that take a part of the tokens, or put parts together again.

A rule has the form rule(flow, node) -> value. It returns None for a call like any
other, and raises NotAlike where tokens come in another order.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
import torch.fx as fx

from .aten_arguments import at, dimension, shape_of, sliced
from .chunk_flow import ChunkFlow, ChunkRule, NotAlike
from .chunk_values import (
    ChunkRows,
    Whole,
    joined,
    pieces_between,
)
from .local_program import LocalProgram

aten = torch.ops.aten


def take(flow: ChunkFlow, node: fx.Node) -> ChunkRows | None:
    """Return the rows that aten.slice(x, dim, start, end, step) takes."""
    arguments: tuple[Any, ...] = node.args
    x, *rest = arguments
    source = flow.values[x]
    dim, start, stop, step = sliced(x, tuple(rest))
    if not isinstance(source, ChunkRows) or dim != source.dim:
        return None
    if step != 1 or start == stop:
        raise NotAlike(f"{at(node)} takes every {step}th token")
    flow.slices += (start, stop) != (0, source.count)
    return flow.part(source, source.start + start, source.start + stop)


def put(flow: ChunkFlow, node: fx.Node) -> ChunkRows | None:
    """Return the rows of aten.slice_scatter(x, part, dim, start, end, step)."""
    arguments: tuple[Any, ...] = node.args
    x, y, *rest = arguments
    base, part = flow.values[x], flow.values[y]
    dim, start, stop, step = sliced(x, tuple(rest))
    rows = base if isinstance(base, ChunkRows) else part
    if not isinstance(rows, ChunkRows) or dim != rows.dim:
        return None
    if isinstance(base, Whole):
        first = part.start - start
        base = flow.cut(x, dim, first, first + shape_of(x)[dim])
    elif isinstance(part, Whole):
        part = flow.cut(y, dim, base.start + start, base.start + stop)
    if not isinstance(base, ChunkRows) or not isinstance(part, ChunkRows) or step != 1:
        raise NotAlike(f"{at(node)} writes tokens in another order")
    first, last = base.start + start, base.start + stop
    if (part.start, part.stop, part.dim) != (first, last, dim):
        raise NotAlike(f"{at(node)} writes tokens to the places of others")
    flow.slices += (first, last) != (base.start, base.stop)
    before = pieces_between(base.pieces, base.start, first)
    after = pieces_between(base.pieces, last, base.stop)

    def lower(program: LocalProgram) -> fx.Node:
        count = program.count(first, last)
        if not count:
            return program.of(base)
        if count == program.count(base.start, base.stop):
            return program.of(part)
        low = program.count(base.start, first)
        args = (program.of(base), program.of(part), dim, low, low + count)
        return program.call(aten.slice_scatter.default, args)

    return ChunkRows(dim, joined([*before, *part.pieces, *after]), lower)


def join(flow: ChunkFlow, node: fx.Node) -> ChunkRows | None:
    """Return the rows that aten.cat(tensors, dim) joins."""
    tensors: Any = node.args[0]
    values = [flow.values[x] for x in tensors]
    dim = dimension(node, 1, len(shape_of(node)))
    if not all(isinstance(v, ChunkRows) and v.dim == dim for v in values):
        return None
    if any(a.stop != b.start for a, b in itertools.pairwise(values)):
        raise NotAlike(f"{at(node)} joins tokens in another order")
    flow.slices += 1

    def lower(program: LocalProgram) -> fx.Node:
        parts = [v for v in values if program.count(v.start, v.stop)] or values[:1]
        if len(parts) == 1:
            return program.of(parts[0])
        return program.call(aten.cat.default, ([program.of(v) for v in parts], dim))

    return ChunkRows(dim, joined([p for v in values for p in v.pieces]), lower)


def take_apart(flow: ChunkFlow, node: fx.Node) -> tuple[ChunkRows, ...] | None:
    """Return the rows of each part that a split makes.

    That is aten.split(x, size, dim) or aten.split_with_sizes(x, sizes, dim).
    """
    x: Any = node.args[0]
    source = flow.values[x]
    dim = dimension(node, 2, len(shape_of(x)))
    if not isinstance(source, ChunkRows) or dim != source.dim:
        return None
    flow.slices += 1
    sizes = [part.shape[dim] for part in node.meta["val"]]
    ends = itertools.accumulate(sizes, initial=source.start)
    return tuple(flow.part(source, a, b) for a, b in itertools.pairwise(ends))


def item(flow: ChunkFlow, node: fx.Node) -> Any:
    arguments: tuple[Any, ...] = node.args
    results, number = arguments
    value = flow.values[results]
    return value[number] if isinstance(value, tuple) else None


RULES: dict[Any, ChunkRule] = {
    aten.slice.Tensor: take,
    aten.slice_scatter.default: put,
    aten.cat.default: join,
    aten.split.Tensor: take_apart,
    aten.split_with_sizes.default: take_apart,
    operator.getitem: item,
}
