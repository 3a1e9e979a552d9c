"""What convolutions read of their operands, by their arguments.

conv1d(x, weight, padding=3)     of 4 taps: a token reads 3 others
conv1d(x, weight, groups=C)      channels keep apart
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ...graph.calls import canonical_call, spelled
from ...graph.nodes import fake_value

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


def convolved(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the input and the weight of a convolution; None for any other call."""
    call = canonical_call(node)
    if call.name not in CONVOLUTIONS:
        return None
    x, weight = call.arguments["input"], call.arguments["weight"]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    return x, weight


def is_taken_in(node: fx.Node) -> bool:
    """Tell whether a convolution takes a pad or a cut in (whole/keep_convolutions)."""
    if spelled(node) == "getitem":
        source = node.args[0]
        return isinstance(source, fx.Node) and convolved(source) is not None
    return spelled(node) == "pad" and all(map(convolved, node.users))


def reach_along(node: fx.Node, dim: int) -> int:
    """Return how many positions beside its own a convolution reads for each."""
    weight = fake_value(canonical_call(node).arguments["weight"])
    taps = weight.shape[dim - fake_value(node).ndim]
    apart, stride = numbers(node, "dilation"), numbers(node, "stride")
    if dim not in apart or dim not in stride:
        return 0
    return max(0, int(apart[dim] * (taps - 1) + 1 - stride[dim]))


def independent_channels(node: fx.Node, entries: int) -> dict[fx.Node, int] | None:
    """Return the dimensions of channels of a convolution's operands, by operand.

    None if there are not as many `entries` in them that keep apart: each has some
    groups of channels. In its result they are where they are in its input.
    """
    arguments = canonical_call(node).arguments
    if arguments["groups"] % entries:
        return None
    x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
    dims = {x: fake_value(x).ndim - fake_value(weight).ndim + 1, weight: 0}
    return dims if bias is None else dims | {bias: 0}


def numbers(node: fx.Node, name: str) -> dict[int, int]:
    """Return numbers of a convolution by dimension of positions; none if unknown."""
    given: Any = canonical_call(node).arguments[name]
    found = (given,) if isinstance(given, int) else tuple(given)
    if not all(isinstance(n, int) for n in found):
        return {}
    weight = fake_value(canonical_call(node).arguments["weight"])
    dims, last = weight.ndim - 2, fake_value(node).ndim
    found = found * dims if len(found) == 1 else found
    return dict(zip(range(last - dims, last), found, strict=True))
