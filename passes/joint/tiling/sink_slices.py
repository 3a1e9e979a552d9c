"""Make only those tokens of a value that a later cut reads.

    cos = cos(mul(positions, frequencies))  # [S, D]
    index_select = index_select(cos, 0, mine)  # [S/N, D]
      ->
    index_select = index_select(positions, 0, mine)  # [S/N]
    cos = cos(mul(index_select, frequencies))  # [S/N, D]

Tables by position are plain values, the same on every rank, so that the graph makes
them for all S tokens of the sequence, and cuts them afterwards. What is token-wise can
be cut before it is made. Runs on the joint graph of AOTAutograd, before `tile_tokens`,
whose rules say what is token-wise.

Legend: S tokens of the sequence, N ranks, D width.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from cpcompile.geometry.lengths import is_same
from cpcompile.torch_private.fake_tensors import detect_fake_mode

from ...graph.graph_pass import graph_pass
from ...graph.nodes import value_of
from ...graph.sequence_tokens import TokenAxis
from .tile_program import copied, for_tokens, sizes_of
from .tile_regions import TileMaps, bytes_of, is_view
from .tile_tokens import Tiling

aten = torch.ops.aten

LEAST_BYTES = 2**20  # of a value that is worth it, but for a number for each token
_CUTS = (aten.index_select.default, aten.slice.Tensor)


@dataclass(frozen=True)
class _Cut:
    """A call that takes `count` of the `tokens` of a value along dimension `dim`.

    reader: the call that reads the value; node: its result. which: what takes the same
    of other values, and the tokens that it takes: an index, or start and end.
    """

    reader: fx.Node
    node: fx.Node
    value: fx.Node
    dim: int
    tokens: int
    count: int
    which: tuple[Any, ...]


@graph_pass()
def sink_slices(graph: fx.Graph, ctx: Tiling) -> int:
    """Cut large values before they are made; return how many."""
    return sink(graph, LEAST_BYTES)


def sink(graph: fx.Graph, least: int) -> int:
    """Cut values of `least` bytes or more before they are made; return how many.

    What picks tokens in an order is such a cut once it picks a part of them.
    """
    done, count = 0, 1
    while count:
        count = _sink(graph, least)
        done += count
    return done


def _sink(graph: fx.Graph, least: int) -> int:
    all_cuts = [cut for x in graph.nodes if (cut := _cut(x, least)) is not None]
    # Of a part of a part only the last one counts.
    parts = {x.reader for x in all_cuts if x.reader is not x.node}
    all_cuts = [x for x in all_cuts if x.node not in parts]
    read = Counter[tuple[fx.Node, int]]()
    for (value, dim, _), count in {
        (cut.value, cut.dim, cut.which): cut.count for cut in all_cuts
    }.items():
        read[value, dim] += count
    cuts = [x for x in all_cuts if read[x.value, x.dim] <= -(-x.tokens // 2)]
    cones = {cut: _cone(cut) for cut in cuts}
    moved = _only_for_cuts(cuts, cones)
    order = {node: i for i, node in enumerate(graph.nodes)}
    copies: dict[Any, fx.Node] = {}
    done = 0
    inputs = map(value_of, graph.find_nodes(op="placeholder"))
    with detect_fake_mode(list(inputs)) or nullcontext():
        for cut in cuts:
            moved_axes = {x: axis for x, axis in cones[cut].items() if x in moved}
            if cut.value in moved_axes and _is_worth_it(moved_axes):
                _move(cut, moved_axes, order, copies)
                done += 1
    if done:
        graph.eliminate_dead_code()
        graph.lint()
    return done


def _is_worth_it(moved: dict[fx.Node, TokenAxis]) -> bool:
    """Tell whether less is computed, or a cut comes to another one."""
    return not all(map(is_view, moved)) or any(
        _is_part(x, axis.dim)
        for node, axis in moved.items()
        for x in node.all_input_nodes
        if value_of(x).ndim == value_of(node).ndim and axis.outer == 1
    )


def _cut(node: fx.Node, least: int) -> _Cut | None:
    """Return the cut that a call is; None if it is no cut of a large value.

    The value is one that the graph makes, of `least` bytes or more, or a number for
    each token, such as the gradient of a loss.
    """
    args: tuple[Any, ...] = node.args
    reader, which = node, (node.target, *args[2:])
    if node.target is aten.split.Tensor and len(node.users) == 1:
        (node,) = node.users
        size, dim = reader.args[1], (*reader.args, 0)[2]
        if not isinstance(size, int):
            return None  # a symbol
        first = node.args[1] * size  # type: ignore[operator]
        which = (aten.slice.Tensor, first, first + value_of(node).shape[dim])
        args = (reader.args[0], dim, *which[1:])
    elif node.op != "call_function" or node.target not in _CUTS:
        return None
    if reader.kwargs or not 2 < len(args) < 5:  # with steps, or of all tokens
        return None
    value, dim = args[:2]
    if not isinstance(value, fx.Node) or not isinstance(dim, int):
        return None
    shape = value_of(value).shape
    dim %= len(shape)
    if which[0] is aten.slice.Tensor and all(isinstance(n, int) for n in which[1:]):
        while _is_part(value, dim) and len(value.users) == 1:
            start: Any = value.args[2]  # of what this one takes a part of
            own = slice(*(*which[1:], None)[:2])
            tokens = range(value_of(value).shape[dim])[own]
            which = (aten.slice.Tensor, start + tokens.start, start + tokens.stop)
            reader, value = value, value.all_input_nodes[0]
        shape = value_of(value).shape
    is_number = all(is_same(n, 1) for n in shape[dim + 1 :])  # of each token
    if value.op != "call_function" or not bytes_of(node):
        return None
    if bytes_of(value) < least and not is_number:
        return None
    count = value_of(node).shape[dim]
    return _Cut(reader, node, value, dim, shape[dim], count, which)


def _is_part(node: fx.Node, dim: int) -> bool:
    """Tell whether a call takes some neighbours along a dimension."""
    args: tuple[Any, ...] = node.args
    return (
        node.target is aten.slice.Tensor
        and len(args) == 4
        and args[1] % value_of(node).ndim == dim
        and all(isinstance(n, int) and n >= 0 for n in args[2:])
        and isinstance(value_of(node).shape[dim], int)
    )


def _cone(cut: _Cut) -> dict[fx.Node, TokenAxis]:
    """Return the token-wise calls that make the value of a cut, each with its axis."""
    cone: dict[fx.Node, TokenAxis] = {}
    waiting, maps = [(cut.value, TokenAxis(cut.dim))], TileMaps()
    while waiting:
        node, axis = waiting.pop()
        if node.op != "call_function" or node in cone:
            continue
        operands = maps.before(node, axis, cut.tokens)
        if operands is None:
            continue
        cone[node] = axis
        waiting += operands.items()
    return cone


def _only_for_cuts(
    cuts: list[_Cut], cones: dict[_Cut, dict[fx.Node, TokenAxis]]
) -> set[fx.Node]:
    """Return the calls of the cones that nothing reads but each other and cuts."""
    moved = {x for cone in cones.values() for x in cone}
    moved -= {x for a in cones.values() for b in cones.values() for x in _differ(a, b)}
    cutting = {cut.reader: cut.value for cut in cuts}
    waiting = list(moved)
    while waiting:
        node = waiting.pop()
        if node in moved and any(
            user not in moved and cutting.get(user) is not node for user in node.users
        ):
            moved.remove(node)
            waiting += node.all_input_nodes
    return moved


def _differ(
    one: dict[fx.Node, TokenAxis], other: dict[fx.Node, TokenAxis]
) -> list[fx.Node]:
    """Return the calls that two cones cut along different dimensions."""
    return [x for x in one.keys() & other.keys() if one[x] != other[x]]


def _cut_of(x: fx.Node, axis: TokenAxis, cut: _Cut) -> fx.Node:
    """Write the same cut of a value whose tokens may be a part of a dimension."""
    graph, (target, *tokens), dim = cut.node.graph, cut.which, axis.dim
    if axis == TokenAxis(dim):
        return copied(graph, target, (x, dim, *tokens), {})
    value, reshape = value_of(x), aten.reshape.default
    apart = [axis.outer, cut.tokens, axis.inner]
    sizes = [*value.shape[:dim], *apart, *value.shape[dim + 1 :]]
    whole = copied(graph, reshape, (x, sizes), {})
    piece = copied(graph, target, (whole, dim + 1, *tokens), {})
    return copied(graph, reshape, (piece, sizes_of(value, axis, cut.count)), {})


def _move(
    cut: _Cut,
    moved_axes: dict[fx.Node, TokenAxis],
    order: dict[fx.Node, int],
    copies: dict[Any, fx.Node],
) -> None:
    """Make the result of a cut from operands that are cut."""
    graph, maps = cut.node.graph, TileMaps()
    with graph.inserting_before(cut.node):
        for node in sorted(moved_axes, key=order.__getitem__):
            if (node, cut.which) in copies:
                continue
            axes = maps.before(node, moved_axes[node], cut.tokens)
            assert axes is not None, f"{node} is token-wise"
            operands = {x: x for x in node.all_input_nodes}
            for x, axis in axes.items():
                key = (x, cut.which) if x in moved_axes else (x, axis, cut.which)
                if key not in copies:
                    copies[key] = _cut_of(x, axis, cut)
                operands[x] = copies[key]
            copies[node, cut.which] = for_tokens(
                graph, node, operands, moved_axes[node], cut.count
            )
    result = copies[cut.value, cut.which]
    cut.node.replace_all_uses_with(result, propagate_meta=False)
