"""Take convolutions for what they compute of a sequence, with the pads and cuts around.

    slice(convolution(x, w, padding 3), 2, 0, S)    ->  window_convolution(x, w, 3, S)
    convolution(constant_pad_nd(x, [3, 0]), w)      ->  window_convolution(x, w, 3, S)

and their gradients alike. A rank borrows the tokens beside its own once then
(cpcompile.ops.window_convolution); each pad and each cut would be another message.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from cpcompile.ops.window_convolution import CONVOLUTION, CONVOLUTION_BACKWARD

from ..graph.graph_pass import graph_pass
from ..graph.local_notes import NOTES

aten = torch.ops.aten


@graph_pass()
def keep_convolutions(graph: fx.Graph, _: object) -> int:
    """Rewrite convolutions that are not transposed; return how many."""
    count = 0
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default
    ):
        count += _rewrite_backward(node)
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        count += _rewrite(node)
    graph.eliminate_dead_code()
    return count


def _rewrite(node: fx.Node) -> bool:
    args: Any = node.args
    x, weight, bias, stride, padding, dilation, transposed, _, groups = args
    if transposed:
        return False
    stride, padding, dilation = _of_each(x, stride, padding, dilation)
    source, before = _without_pad(x, padding)
    result, skipped = node, [0] * len(stride)
    while (cut := _only_cut(result)) is not None:
        result, dim, first = cut
        skipped[dim - 2] += first
    before = [n - i * s for n, i, s in zip(before, skipped, stride, strict=True)]
    counts = list(result.meta["val"].shape[2:])
    new = (source, weight, bias, stride, before, counts, dilation, groups)
    result.replace_all_uses_with(_call(result, CONVOLUTION, new, result.meta["val"]))
    return True


def _rewrite_backward(node: fx.Node) -> bool:
    args: Any = node.args
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = args
    if transposed:
        return False
    stride, padding, dilation = _of_each(x, stride, padding, dilation)
    skipped = [0] * len(stride)
    while (written := _written_slice(grad)) is not None:
        grad, dim, first = written
        skipped[dim - 2] += first
    source, before = _without_pad(x, padding)
    results = {user.args[1]: user for user in node.users}
    cut = results.get(0)
    if source is not x and cut is not None:
        users = list(cut.users)
        if len(users) != 1 or not _undoes(users[0], x):
            source, before = x, list(padding)
        else:
            results[0] = users[0]
    before = [n - i * s for n, i, s in zip(before, skipped, stride, strict=True)]
    new = (grad, source, weight, stride, before, dilation, groups, mask)
    whole = [x.meta["val"] for x in (source, weight)]
    values = [*whole, whole[0].new_empty(whole[1].shape[0])]
    values = [v if m else v.new_empty(0) for v, m in zip(values, mask, strict=True)]
    call = _call(node, CONVOLUTION_BACKWARD, new, values)
    for place, user in results.items():
        with node.graph.inserting_before(user):
            item = node.graph.call_function(operator.getitem, (call, place))
        item.meta = dict(user.meta)
        user.replace_all_uses_with(item)
    return True


def _of_each(x: fx.Node, *numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield a number for each dimension; one may stand for all."""
    dims = x.meta["val"].ndim - 2
    return (list(n) * dims if len(n) == 1 else list(n) for n in numbers)


def _without_pad(x: fx.Node, padding: Sequence[int]) -> tuple[fx.Node, list[int]]:
    """Return what was padded with zeros, and the positions before it in all."""
    if x.target is not aten.constant_pad_nd.default:
        return x, list(padding)
    args: Any = x.args
    source, pads, *value = args
    if any(value) or min(pads) < 0 or len(pads) > 2 * len(padding):
        return x, list(padding)
    first = [*reversed(pads[::2])]
    first = [0] * (len(padding) - len(first)) + first
    return source, [n + m for n, m in zip(padding, first, strict=True)]


def _undoes(node: fx.Node, pad: fx.Node) -> bool:
    """Tell whether a call takes away what `pad` has added."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    taken, added = node.args[1], pad.args[1]
    return list(taken) == [-n for n in added]  # type: ignore[union-attr, arg-type, operator]


def _only_cut(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return the one user of a value if it is a slice of positions, and its start."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.target is not aten.slice.Tensor:
        return None
    dim, start, step = _slice_of(user.args[1:], node.meta["val"].shape)
    return (user, dim, start) if dim > 1 and step == 1 else None


def _written_slice(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return the gradient of a slice, its dimension and its start."""
    if node.target is not aten.slice_backward.default:
        return None
    args: Any = node.args
    source, sizes, *cut = args
    dim, start, step = _slice_of(cut, sizes)
    return (source, dim, start) if dim > 1 and step == 1 else None


def _slice_of(args: Sequence[Any], shape: Sequence[int]) -> tuple[int, int, int]:
    default: tuple[Any, ...] = (0, None, None, 1)
    dim, start, stop, step = [*args, *default[len(args) :]]
    dim %= len(shape)
    start, _, step = slice(start, stop, step).indices(shape[dim])
    return dim, start, step


def _call(like: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    with like.graph.inserting_before(like):
        node = like.graph.call_function(target, args)
    node.meta = {key: like.meta[key] for key in NOTES if key in like.meta}
    node.meta["val"] = value
    return node
