"""Cut tokens before products make wide values of them, forward and backward.

    logits = product(h, W)  [B, S, V]           h' = h[:, :-1]
    y = logits[:, :-1]                    ->    y = product(h', W)

    dlogits = slice_backward(dy)  [B, S, V]     dW = product(dy, h')
    dW = product(dlogits, h)              ->    dh = slice_backward(product(dy, W))
    dh = product(dlogits, W)

A cut moves tokens between ranks. Of narrow values that is cheap, and a loss of wide
ones can run in tiles, between which nothing moves. Calls on the way are token-wise
(flow/dim_rules); those of the backward give zeros for the zeros that a cut adds.

Left alone: values of symbolic size, steps, wide values that something else reads.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from cpcompile.torch_private.fake_tensors import detect_fake_mode

from ..flow.dim_maps import Axes, TokenSum
from ..graph.graph_pass import graph_pass
from ..graph.local_notes import NOTES
from ..graph.nodes import value_of
from ..graph.sequence_tokens import TokenAxis
from ..joint.tiling.tile_program import copied, for_tokens
from ..joint.tiling.tile_regions import TileMaps, bytes_of
from .keep_products import PRODUCT, VIEWS

aten = torch.ops.aten
_PRODUCTS = (PRODUCT, aten.mm.default, aten.bmm.default)
# Zero where their first operand is zero; of the others also where another one is.
_OF_FIRST = (aten.div.Tensor, aten.div.Scalar, aten.tanh_backward.default)
_KEEP_ZEROS = (
    *(*_PRODUCTS, *VIEWS, *_OF_FIRST),
    *(aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.sum.dim_IntList),
    *(aten._to_copy.default, torch.ops.prims.convert_element_type.default),
    *(aten.clone.default, aten.t.default, aten.transpose.int, aten.permute.default),
    *(aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
)


@dataclass
class _Cut:
    """Tokens that are left of a value, and what is cut so.

    call: of the cut. dim, start, end: its arguments; count: how many of `tokens`.
    axes: values whose tokens are cut, each with its axis. calls: with their results and
    the axes of their operands.
    """

    call: fx.Node
    dim: int
    start: int
    end: int
    tokens: int
    count: int
    axes: Axes = field(default_factory=dict)
    calls: dict[fx.Node, tuple[Any, Axes]] = field(default_factory=dict)
    copies: dict[Any, fx.Node] = field(default_factory=dict)

    def is_same(self, node: fx.Node, axis: TokenAxis) -> bool:
        """Tell whether a call cuts its operand, whose tokens are at `axis`, alike."""
        found = _read(node, 1) if node.target is aten.slice.Tensor else None
        own = (TokenAxis(found.dim), found.start, found.end) if found else None
        return own == (axis, self.start, self.end)

    def of(self, x: fx.Node, axis: TokenAxis) -> fx.Node:
        """Return the tokens of a value that are left, cut once for all readers."""
        args = (x, axis.dim, self.start, self.end)
        after = x
        while after.next.op in ("placeholder", "get_attr"):
            after = after.next
        for user in x.users:
            if user.target is aten.slice.Tensor and user.args == args:
                after.append(user)  # before all that read it from now on
                return user
        with x.graph.inserting_after(after):
            return _noted(x, aten.slice.Tensor, args)

    def copy(self, node: fx.Node) -> fx.Node:
        """Write a call of `calls` for the tokens that are left."""
        result, operand_axes = self.calls[node]
        operands = {x: x for x in node.all_input_nodes}
        for x, axis in operand_axes.items():
            operands[x] = self.copies.get(x) or self.of(x, axis)
        copy = for_tokens(node.graph, node, operands, result, self.count)
        if copy.target is aten.reshape.default and _is_view(copy):
            copy.target = aten.view.default
        _note(copy, node)
        return copy


@graph_pass()
def cut_early(graph: fx.Graph, _: object) -> int:
    """Cut tokens before wide values are made of them; return how many cuts move."""
    maps, count = TileMaps(), 0
    order = {node: place for place, node in enumerate(graph.nodes)}
    inputs = map(value_of, graph.find_nodes(op="placeholder"))
    with detect_fake_mode(list(inputs)) or nullcontext():
        for target, move in (
            (aten.slice_backward.default, _cut_gradients),
            (aten.slice.Tensor, _cut_operands),
        ):
            for node in graph.find_nodes(op="call_function", target=target):
                cut = _read(node, 1 + (move is _cut_gradients))
                count += cut is not None and move(cut, maps, order)
    if count:
        graph.eliminate_dead_code()
    return count


def _read(node: fx.Node, first: int) -> _Cut | None:
    """Read the arguments of a cut from number `first` on; None if it says more."""
    args, rest = tuple[Any, ...](node.args), tuple[Any, ...]((0, None, None, 1))
    dim, start, end, step = (*args[first:], *rest[len(args) - first :])
    wide, narrow = (node, args[0]) if first > 1 else (args[0], node)
    if step != 1 or not all(isinstance(x, int) for x in (dim, start, end)):
        return None
    shape = value_of(wide).shape
    dim %= len(shape)
    sizes = (shape[dim], value_of(narrow).shape[dim])
    if not bytes_of(wide) or sizes[0] == sizes[1]:
        return None
    return _Cut(node, dim, start, end, *sizes)


def _cut_gradients(cut: _Cut, maps: TileMaps, order: dict[fx.Node, int]) -> bool:
    """Let products read the gradient of a cut as it was before it is filled up."""
    wide, waiting, ends = cut.call, [cut.call], []
    cut.axes[wide] = TokenAxis(cut.dim)
    while waiting:
        for user in waiting.pop().users:
            if user in cut.calls:
                continue
            found = None
            if user.target in _KEEP_ZEROS:
                found = maps.after(user, cut.axes, cut.tokens)
            if found is None or user not in order:
                return False
            cut.calls[user] = result, _ = found
            if isinstance(result, TokenSum):
                continue
            cut.axes[user] = result
            if _is_narrow(user, wide):
                ends.append(user)
            else:
                waiting.append(user)
    if not any(x.target in _PRODUCTS for x in cut.calls):
        return False
    others = {x for _, xs in cut.calls.values() for x in xs} - cut.axes.keys()
    if 2 * sum(map(bytes_of, others)) > bytes_of(wide):
        return False
    for node, (_, operands) in cut.calls.items():
        of_first = node.target in _OF_FIRST
        if of_first and not {*node.all_input_nodes[1:]}.isdisjoint(cut.axes):
            return False
        for x, axis in operands.items():
            if cut.axes.get(x, axis) != axis or not (x in cut.axes or _is_dim(axis)):
                return False
    if not all(_is_dim(cut.axes[x]) for x in ends):
        return False
    cut.copies[wide] = wide.args[0]  # type: ignore[assignment]
    for node in sorted(cut.calls, key=order.__getitem__):
        with node.graph.inserting_before(node):
            copy = cut.copies[node] = cut.copy(node)
            if node in ends:
                axis = cut.axes[node]
                sizes = (list(value_of(node).shape), axis.dim, cut.start, cut.end, 1)
                copy = _noted(node, aten.slice_backward.default, (copy, *sizes))
        if node in ends or node not in cut.axes:
            node.replace_all_uses_with(copy, propagate_meta=False)
    return True


def _cut_operands(cut: _Cut, maps: TileMaps, order: dict[fx.Node, int]) -> bool:
    """Cut the narrow operands of a product in place of its wide result."""
    wide: Any = cut.call.args[0]
    waiting, leaves = [(wide, TokenAxis(cut.dim))], Axes()
    while waiting:
        node, axis = waiting.pop()
        if cut.axes.setdefault(node, axis) != axis:
            return False
        if node in cut.calls or node in leaves:
            continue
        operands = None
        if node in order and node.op == "call_function" and not _is_narrow(node, wide):
            operands = maps.before(node, axis, cut.tokens)
        if operands is None:
            leaves[node] = axis
        else:
            cut.calls[node] = axis, operands
            waiting += operands.items()
    if not leaves or not all(map(_is_dim, leaves.values())):
        return False
    if 2 * sum(map(bytes_of, leaves)) > bytes_of(wide):
        return False
    readers = [(x, user) for x in cut.calls for user in x.users]
    cuts = [(x, user) for x, user in readers if user not in cut.calls]
    if not all(cut.is_same(user, cut.axes[x]) for x, user in cuts):
        return False
    for node in sorted(cut.calls, key=order.__getitem__):
        with node.graph.inserting_before(node):
            cut.copies[node] = cut.copy(node)
    for x, user in cuts:
        user.replace_all_uses_with(cut.copies[x], propagate_meta=False)
    return True


def _is_narrow(node: fx.Node, wide: fx.Node) -> bool:
    return 2 * bytes_of(node) <= bytes_of(wide)


def _is_dim(axis: TokenAxis) -> bool:
    """Tell whether tokens are all of a dimension."""
    return axis == TokenAxis(axis.dim)


def _is_view(node: fx.Node) -> bool:
    args: tuple[Any, ...] = node.args
    try:
        value_of(args[0]).view(args[1])
    except RuntimeError:
        return False
    return True


def _noted(like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = copied(like.graph, target, args, {}, like)
    _note(node, like)
    return node


def _note(node: fx.Node, like: fx.Node) -> None:
    node.meta.update({key: like.meta[key] for key in NOTES if key in like.meta})
