"""Rules of calls that count tokens, from the first one or from the end.

x[:, 1:], x[:, :-1], x[:, -1], pad(x, (2, 0)), cat([cls, x], 1), conv1d(x, w), arange(P)
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import is_symbol
from cpcompile.torch_private import pytree

from ...graph.calls import canonical_call
from ...graph.effects import view_of, written_by
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenAxis, Tokens
from .padded_graph import PaddedGraph
from .sizes import Found, Unproved, with_sizes

FILLED = {
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
_REPEATED = {"expand", "broadcast_to"}
_ALL = slice(None)


def beginning(graph: PaddedGraph, node: fx.Node) -> Tokens | None:
    """Return the tokens of a result each of which is the same whatever the length is.

    None if no size of the result depends on the length. Raises: Unproved.
    """
    call, value = canonical_call(node), fake_value(node)
    dims = [d for x in pytree.tree_leaves(value) for d in graph.sizes.reaching(x)]
    if not dims:
        return None
    extra = graph.sizes.extra_of(value.shape[dims[0]]) if len(dims) == 1 else None
    if extra is None:
        raise Unproved("a size depends on the length")
    if call.name == "getitem":  # the first rows of a table
        for part in _parts(call.arguments["input"], with_sizes(node.args[1])):
            if isinstance(part, slice) and (
                is_symbol(part.start) or is_symbol(part.stop)
            ):
                _require_from_the_first(part)
    elif call.name == "arange":
        start, step = (call.arguments.get(k, n) for k, n in (("start", 0), ("step", 1)))
        if not isinstance(start, int) or step != 1:
            raise Unproved("positions begin at the length, or go in steps")
    elif call.name not in FILLED | _REPEATED:
        raise Unproved("it makes as many numbers as there are tokens")
    return Tokens(TokenAxis(dims[0]), extra)


def getitem(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Find the tokens of x[index], of which x or the index have some."""
    x, tokens = arguments["input"], graph.tokens(arguments["input"])
    index = with_sizes(arguments["index"])
    if tokens is None or not is_of_numbers(index):
        return graph.node_by_token(node)
    return _picked(graph, node, *parts_of(x, index, tokens))


def is_of_numbers(index: Any) -> bool:
    """Tell whether an index has only numbers, slices and lists of numbers."""
    leaves = pytree.tree_leaves(index)
    return not any(isinstance(x, fx.Node | Tensor | bool) for x in leaves)


def parts_of(x: fx.Node, index: Any, tokens: Tokens) -> tuple[list[Any], int]:
    """Return an index, part by part, and which part is that of the tokens of x."""
    parts = _parts(x, index)
    dims = [i for i, part in enumerate(parts) if part is not None]
    return parts, dims[tokens.axis.dim]


def select(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Find the tokens of x.select(dim, number), which is x[:, number]."""
    x, place = (
        arguments["input"],
        arguments["dim"] % fake_value(arguments["input"]).dim(),
    )
    index = (*[_ALL] * place, with_sizes(arguments["index"]), ...)
    tokens = graph.tokens(x)
    assert tokens is not None, "its only operand has tokens"
    return _picked(graph, node, *parts_of(x, index, tokens))


def _parts(x: fx.Node, index: Any) -> list[Any]:
    """Return an index with a slice in place of what an ellipsis, or nothing, takes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    taken = sum(x is not None and x is not ... for x in parts)
    rest = [_ALL] * (fake_value(x).dim() - taken)
    at = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    return parts[:at] + rest + parts[at + 1 :]


def _picked(graph: PaddedGraph, node: fx.Node, parts: list[Any], place: int) -> Found:
    """Find the tokens of an index whose part number `place` is that of the tokens."""
    x, part, rest = node.args[0], parts[place], of_all_tokens(parts, place)
    tokens = graph.tokens(x)
    assert isinstance(x, fx.Node) and tokens is not None
    dims = graph.sizes.reaching(fake_value(node))
    start = part.start if isinstance(part, slice) else part
    if is_fixed(part, tokens) and not dims:
        return None
    if isinstance(start, int) and start < 0 and not dims:
        _check_unwritten(graph, x)
        if any(isinstance(p, list) for p in rest) or _limits(part):
            raise Unproved("it picks others with a token at the end")
        every = x
        if any(p != _ALL for p in rest):
            every = graph.call(node, operator.getitem, x, rest)
            graph.found[every] = graph.by_token(operator.getitem, x, rest)
        several = isinstance(part, slice)
        graph.replace(node, graph.from_the_end(node, every, -start, several))
        return None
    if not isinstance(part, slice):
        return graph.node_by_token(node)
    picked_tokens = graph.by_token(operator.getitem, x, rest)
    assert isinstance(picked_tokens, Tokens)
    extra = graph.sizes.extra_of(fake_value(node).shape[picked_tokens.axis.dim])
    if part == _ALL or _is_all(graph, part, tokens, extra):
        return picked_tokens
    if not tokens.is_whole:
        raise Unproved("it cuts sequences that are one dimension")
    if extra is None:
        raise Unproved("it has another number of tokens")
    _require_from_the_first(part)
    return Tokens(picked_tokens.axis, extra)


def of_all_tokens(parts: list[Any], place: int) -> tuple[Any, ...]:
    """Return an index with all tokens in place of the part that picks some."""
    return tuple(_ALL if i == place else part for i, part in enumerate(parts))


def is_fixed(part: Any, tokens: Tokens) -> bool:
    """Tell whether a part takes tokens counted from the first, as of every length."""
    numbers = [part.start or 0, part.stop] if isinstance(part, slice) else [part]
    counted = all(isinstance(n, int) and n >= 0 for n in numbers)
    return counted and tokens.axis.outer == 1


def _limits(part: Any) -> bool:
    return isinstance(part, slice) and not part.stop is part.step is None


def _is_all(graph: PaddedGraph, part: slice, tokens: Tokens, extra: int | None) -> bool:
    """Tell whether a slice takes the last n, of which there are no more."""
    if part.start is None or _limits(part):
        return False
    if is_symbol(part.start):
        reach = graph.sizes.extra_of(-part.start)
        return reach is not None and reach >= tokens.extra
    return bool(part.start < 0) and extra == tokens.extra


def _require_from_the_first(part: slice) -> None:
    start = 0 if part.start is None else part.start
    if not isinstance(start, int) or start < 0 or part.step not in (None, 1):
        raise Unproved("it counts tokens from the end, or in steps")


def _check_unwritten(graph: PaddedGraph, x: fx.Node) -> None:
    """Raise Unproved if a write may go through a view of tokens of `x`, or show in it.

    The view is replaced by a copy. Writes of other graphs, as of a checkpoint region,
    may be to the same memory by another name.
    """
    memory = memory_of(x)
    for node in graph.writes:
        written_to = map(memory_of, written_by(node))
        if node.graph is not x.graph or memory in written_to:
            raise Unproved("tokens at the end are read of what is written to")


def memory_of(x: fx.Node) -> fx.Node:
    """Return the value that `x` is a view of."""
    while (source := view_of(x)) is not None:
        x = source
    return x


def padded(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Find the tokens that a pad shifts; the padding has to be what it appends."""
    x, widths = arguments["input"], arguments["pad"]
    tokens = graph.tokens(x)
    assert tokens is not None, "its only operand has tokens"
    place = 2 * (fake_value(x).dim() - 1 - tokens.axis.dim)
    before, after = [*widths[place : place + 2], 0, 0][:2]
    if not before and not after:
        return tokens
    constant = arguments.get("mode", "constant") == "constant"
    if not (constant and tokens.is_whole and min(before, after) >= 0):
        raise Unproved("tokens of the end are put at the start, or cut off")
    if after:
        graph.hide(node, x, arguments.get("value") or 0)
    return Tokens(tokens.axis, tokens.extra + before + after)


def joined(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Find the tokens that are put after a fixed number of others."""
    *first, last = arguments["tensors"]
    tokens, dims = graph.tokens(last), fake_value(last).dim()
    if tokens is None or tokens.axis.dim != arguments.get("dim", 0) % dims:
        return graph.node_by_token(node)
    if any(graph.tokens(x) for x in first) or not tokens.is_whole:
        raise Unproved("tokens are put after others")
    shapes = [fake_value(x).shape for x in first]
    dim = tokens.axis.dim
    more = sum(int(n[dim]) for n in shapes if len(n) > dim)  # torch takes [0] too
    return Tokens(tokens.axis, tokens.extra + more)


def one_hot(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Find the tokens of a one-hot code, for which DTensor has no rule."""
    if arguments["num_classes"] == -1:
        raise Unproved("it looks for the largest class of all tokens")
    return graph.tokens(arguments["input"])


def convolved(graph: PaddedGraph, node: fx.Node, arguments: dict[str, Any]) -> Found:
    """Fill the padding with the zeros that a convolution adds after the last token.

    If the numbers of its results and of the tokens differ by a constant, as its size
    says, result i reads from token i - before on, whatever the length is.
    """
    x, weight = arguments["input"], arguments["weight"]
    tokens, first = graph.tokens(x), fake_value(x).dim() - fake_value(weight).dim() + 2
    if tokens is None or any(
        graph.tokens(n) for n in node.all_input_nodes if n is not x
    ):
        raise Unproved("the weight of a convolution has tokens")
    if not tokens.is_whole or tokens.axis.dim < first:
        raise Unproved("a convolution of tokens that are no dimension of positions")
    extra = graph.sizes.extra_of(fake_value(node).shape[tokens.axis.dim])
    if extra is None:
        raise Unproved("a convolution changes the number of tokens")
    pad = canonical_call(x)
    source = graph.tokens(pad.arguments.get("input"))
    zeros = pad.name == "pad" and not pad.arguments.get("value")
    if zeros and source is not None and source.axis == tokens.axis:
        # pad_convolutions looks for conv1d(pad(x, (2, 0)), ..).
        graph.hide(x, pad.arguments["input"], 0)
    else:
        graph.hide(node, x, 0)
    return Tokens(tokens.axis, extra)
