"""Bring convolutions that give as many tokens as they take to one form.

    y = conv1d(x, weight, bias, (1,), (3,))[..., :1024]     # of 1024 tokens
      ->
    y = padded_convolution(x, weight, bias, (1,), [(3, 0)], (1,), 1)

Causal models call them like this, or pad before the call. Passes that look for what
mixes tokens read from the call which tokens it borrows, and which channels it keeps
apart. AOTAutograd takes it apart again (whole/keep_convolutions).
"""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from cpcompile.ops.dtensor.padded_convolution import (
    padded_convolution,
)

from ...graph.calls import canonical_call
from ...graph.constant_arguments import NewCall
from ...graph.context import Context
from ...graph.graph_pass import graph_pass
from ...graph.nodes import all_nodes, fake_value, insert_call

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def convolved(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the input and the weight of a convolution; None for any other call."""
    if node.target is padded_convolution:
        x, weight = node.args[:2]
    elif (call := canonical_call(node)).name in CONVOLUTIONS:
        x, weight = call.arguments["input"], call.arguments["weight"]
    else:
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    return x, weight


def reach_along(node: fx.Node, dim: int) -> int:
    """Return how many positions beside its own a convolution reads for each."""
    call = padded_call(node)
    i = -1 if call is None else dim - fake_value(node).ndim + len(call.args[3])
    if call is None or i < 0:
        return 0
    taps = fake_value(call.args[1]).shape[2 + i]
    return max(0, int(call.args[5][i] * (taps - 1) + 1 - call.args[3][i]))


def independent_channels(node: fx.Node, entries: int) -> dict[fx.Node, int] | None:
    """Return the dimensions of channels of a convolution's operands, by operand.

    None if there are not as many `entries` in them that keep apart: each has some
    groups of channels. In its result they are where they are in its input.
    """
    call = padded_call(node)
    if call is None or call.args[6] % entries:
        return None
    x, weight, bias, *_ = call.args
    dims = {x: fake_value(x).ndim - len(call.args[3]) - 1, weight: 0}
    return dims if bias is None else dims | {bias: 0}


@graph_pass()
def pad_convolutions(graph: fx.Graph, ctx: Context) -> int:
    """Rewrite causal convolutions; return their number. Never raises."""
    count = 0
    for node in all_nodes(graph):
        if canonical_call(node).name in CONVOLUTIONS:
            count += _without_slices(node) or _without_pad(node)
    return count


def _without_slices(node: fx.Node) -> bool:
    """Rewrite conv(x, padding=n)[..., :tokens], which cuts what was added at the end.

    Returns: whether the node was such a call.
    """
    call, value = padded_call(node), fake_value(node)
    if call is None or not node.users:
        return False
    source, padding = fake_value(call.args[0]), list(call.args[4])
    dim = value.ndim - 1
    tokens, after = source.shape[dim], padding[-1][1]
    if value.shape[dim] != tokens + after or padding[-1][0] != after or not after:
        return False
    for user in node.users:
        index: Any = canonical_call(user).arguments.get("index")
        if canonical_call(user).name != "getitem" or not isinstance(index, tuple):
            return False
        full = index[:-1] in ((...,), (slice(None),) * dim)
        last = index[-1]
        if not full or not isinstance(last, slice) or last.start not in (None, 0):
            return False
        if last.step not in (None, 1) or fake_value(user).shape[dim] != tokens:
            return False
    padding[-1] = (after, 0)
    args = (*call.args[:4], padding, *call.args[5:])
    result = fake_value(next(iter(node.users)))
    with node.graph.inserting_before(node):
        new = insert_call(node.graph, padded_convolution, args, like=node, value=result)
    for user in list(node.users):
        user.replace_all_uses_with(new)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def _without_pad(node: fx.Node) -> bool:
    """Rewrite conv(F.pad(x, (n, 0))).

    Returns: whether the node was such a call.
    """
    call = padded_call(node)
    if call is None:
        return False
    source = call.args[0]
    pad_call = canonical_call(source)
    if pad_call.name != "pad" or pad_call.arguments["mode"] != "constant":
        return False
    pads, value = pad_call.arguments["pad"], pad_call.arguments["value"]
    dims = len(call.args[3])
    if value not in (None, 0) or len(pads) > 2 * dims:
        return False
    if not all(isinstance(x, int) and x >= 0 for x in pads):
        return False
    padding = [list(pair) for pair in call.args[4]]
    for i in range(len(pads) // 2):
        padding[-1 - i][0] += pads[2 * i]
        padding[-1 - i][1] += pads[2 * i + 1]
    unpadded = pad_call.arguments["input"]
    after, before = (fake_value(x).shape[-dims:] for x in (node, unpadded))
    if not any(map(operator.eq, after, before)):
        return False  # its results are not the tokens'
    args = (unpadded, *call.args[1:4], [tuple(x) for x in padding], *call.args[5:])
    with node.graph.inserting_before(node):
        new = insert_call(
            node.graph, padded_convolution, args, like=node, value=fake_value(node)
        )
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    if not source.users:
        node.graph.erase_node(source)
    return True


def padded_call(node: fx.Node) -> NewCall | None:
    """Return the call as one of padded_convolution; None if a number is not known."""
    if node.target is padded_convolution:
        return NewCall(padded_convolution, node.args)
    arguments = canonical_call(node).arguments
    weight = fake_value(arguments["weight"])
    dims = weight.ndim - 2
    numbers = [of_dims(arguments[x], dims) for x in ("stride", "dilation")]
    if arguments["padding"] in ("same", "valid"):
        whole = arguments["padding"] == "same"
        padding = [
            ((zeros := whole * step * (taps - 1)) // 2, zeros - zeros // 2)
            for step, taps in zip(numbers[1] or (), weight.shape[2:], strict=True)
        ]
    else:
        both = of_dims(arguments["padding"], dims)
        padding = [(n, n) for n in both or ()]
    if len(padding) != dims or None in numbers:
        return None
    operands = (arguments["input"], arguments["weight"], arguments["bias"])
    stride, dilation = numbers
    args = (*operands, stride, padding, dilation, arguments["groups"])
    return NewCall(padded_convolution, args)


def of_dims(x: Any, dims: int) -> tuple[int, ...] | None:
    """Return one number for each dimension; a single number counts for all."""
    if isinstance(x, int):
        return (x,) * dims
    if not isinstance(x, tuple | list) or not all(isinstance(n, int) for n in x):
        return None
    return tuple(x) * dims if len(x) == 1 else tuple(x)
