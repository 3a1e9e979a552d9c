"""Share out calls that read or make windows of tokens, and change their number.

Strided and transposed convolutions, pooling, unfold, and resizing to the nearest token.

    x: [B, C, 61] S(2) on 2 ranks, 31 and 30 tokens
    conv1d(x, weight, bias, (2,), (1,))                   # 3 taps, 31 results
      ->
    spans = cp_move_tokens(x, 2, 'windows', 33, 32, 1, 1, 2)    [B, C, 66], 33 and 33
    padded_convolution(spans, weight, bias, (2,), [(0, 0)], (1,), 1, 2)[..., :31]

A rank has the tokens that its results are made of, from the first of the first window
to the last of the last one: its own, and what it borrows at its borders. All ranks have
as many, some of them zeros, and as many results, of which the last ones are cut off.
Convolutions whose windows begin at every token give as many results as tokens where
they are padded (`padded_convolution`), and lose some of them after that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import LengthNotSymbolic, is_same, is_symbol
from cpcompile.ops.dtensor.padded_convolution import (
    padded_convolution,
    window_counts,
)
from cpcompile.ops.dtensor.transposed_convolution import transposed_convolution
from cpcompile.ops.dtensor.windowed_pool import POOLS, windowed_pool

from ...graph.calls import canonical_call
from ...graph.new_call import NewCall
from ...graph.nodes import fake_value
from ...placement.decisions import Decision, FallBack, Replace, RewriteCall
from ...placement.graph_values import GraphValues
from ..moves.move_rules import is_split, move_tokens, split_dim
from ..normalize.pad_convolutions import CONVOLUTIONS, of_dims, padded_call


def strided_convolution(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a convolution that has not as many results as tokens."""
    call = padded_call(node)
    if call is None:
        return None
    x, weight, bias, stride, padding, dilation, groups = call.args
    i = _position(known, x, len(stride))
    if i is None or is_split(known, weight):
        return None
    dim = fake_value(x).ndim - len(stride) + i
    taps, count = fake_value(weight).shape[2 + i], fake_value(node).shape[dim]
    if stride[i] == 1:
        return _at_every_token(known, call, i, dim, count)
    reach = dilation[i] * (taps - 1)
    spans = _spans(known, x, dim, (reach, stride[i], padding[i][0]), count)
    if spans is None:  # DTensor's own convolution fails in the backward
        return FallBack("ranks would have no results, or need all positions")
    numbers = (stride, _with(padding, i, (0, 0)), dilation, groups)
    args = (spans, weight, bias, *numbers, dim)
    return _first(known, NewCall(padded_convolution, args), dim, count)


def pool(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a pooling of tokens."""
    call = canonical_call(node)
    given, name = call.arguments, call.name
    dims = int(name[-2])
    sizes, strides, padding, dilation = (
        of_dims(given.get(x) or default, dims)
        for x, default in (
            ("kernel_size", None),
            ("stride", given["kernel_size"]),
            ("padding", 0),
            ("dilation", 1),
        )
    )
    if sizes is None or strides is None or padding is None or dilation is None:
        return None
    i = _position(known, given["input"], dims)
    if i is None or given.get("return_indices") or given.get("divisor_override"):
        return None
    if any(padding) and not given.get("count_include_pad", True):
        return None
    if not fake_value(given["input"]).is_floating_point():
        return None  # they have no lowest number to fill in
    x = given["input"]
    dim = fake_value(x).ndim - dims + i
    count = fake_value(node).shape[dim]
    both = [(n, n) for n in padding]
    wanted = window_counts(fake_value(x).shape[-dims:], both, dilation, sizes, strides)
    if given.get("ceil_mode") and wanted != list(fake_value(node).shape[-dims:]):
        return None
    fill = float("-inf") if name.startswith("max") else 0.0
    reach = dilation[i] * (sizes[i] - 1)
    spans = _spans(known, x, dim, (reach, strides[i], padding[i]), count, fill)
    if spans is None:
        return None
    args = (name, spans, sizes, strides, _with(padding, i, 0), dilation, dim)
    return _first(known, NewCall(windowed_pool, args), dim, count)


def adaptive_pool(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a mean of so many equal windows of tokens, or of all of them."""
    call = canonical_call(node)
    x, dims = call.arguments["input"], int(call.name[-2])
    before, after = (fake_value(y).shape[-dims:] for y in (x, node))
    if split_dim(known, x) is not None and all(is_same(n, 1) for n in after):
        return RewriteCall(NewCall(torch.mean, (x, list(range(-dims, 0)), True)))
    i = _position(known, x, dims)
    if i is None:
        return None
    if any(not n or size % n for size, n in zip(before, after, strict=True)):
        return None
    sizes = tuple(size // n for size, n in zip(before, after, strict=True))
    dim = fake_value(x).ndim - dims + i
    spans = _spans(known, x, dim, (sizes[i] - 1, sizes[i], 0), after[i])
    if spans is None:
        return None
    zeros, ones = (0,) * dims, (1,) * dims
    name = call.name.removeprefix("adaptive_")
    pooled = NewCall(windowed_pool, (name, spans, sizes, sizes, zeros, ones, dim))
    return _first(known, pooled, dim, after[i])


def transposed(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a transposed convolution of tokens.

    It is made of as many tokens on every rank, with zeros after the last one as far as
    its results reach, and cut.
    """
    given = canonical_call(node).arguments
    x, weight, bias = given["input"], given["weight"], given["bias"]
    dims = fake_value(weight).ndim - 2
    stride, padding, added, dilation = (
        of_dims(given[name], dims)
        for name in ("stride", "padding", "output_padding", "dilation")
    )
    if stride is None or padding is None or added is None or dilation is None:
        return None
    i = _position(known, x, dims)
    if i is None or is_split(known, weight) or is_split(known, bias):
        return None
    dim = fake_value(x).ndim - dims + i
    tokens, count = fake_value(x).shape[dim], fake_value(node).shape[dim]
    ranks, step, cut = known.ctx.ranks, stride[i], padding[i]
    reach = dilation[i] * (fake_value(weight).shape[2 + i] - 1) + 1
    needed = -(-(cut + count) // step)
    if reach < step or count <= 0 or leaves_ranks_empty(count, ranks):
        return None
    even = ranks * -(-max(needed, tokens) // ranks)
    source: Any = x
    if even > tokens:
        pads = (0, even - tokens, "constant")
        source = move_tokens(known, [x], dim, "pad", *pads)
    args = (
        *(source, weight, bias, stride, _with(padding, i, 0), _with(added, i, 0)),
        *(given["groups"], dilation, dim),
    )
    made = NewCall(transposed_convolution, args)
    return Replace(move_tokens(known, [made], dim, "slice", cut, cut + count, 1))


def resized(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on tokens that are repeated: the nearest ones of a larger size.

    torch multiplies places by a float32, one over the scale that it is given, or that
    sizes give. Only by a power of two is that a repetition for certain: twice the
    tokens by a scale of 2.05 are others, and some factors (41, 47) are not exact.
    """
    given = canonical_call(node).arguments
    x = given["input"]
    dims = fake_value(x).ndim - 2
    i = _position(known, x, dims) if dims > 0 else None
    if i is None or given["mode"] != "nearest":
        return None
    before, after = (list(fake_value(y).shape[2:]) for y in (x, node))
    if any(n % m for n, m in zip(after, before, strict=True)):
        return None
    factors = [n // m for n, m in zip(after, before, strict=True)]
    if any(factor & (factor - 1) for factor in factors):
        return None
    scales = given["scale_factor"]
    if scales is not None and not given["recompute_scale_factor"]:
        scales = [scales] * dims if isinstance(scales, int | float) else list(scales)
        if scales != factors:
            return None
    if leaves_ranks_empty(after[i], known.ctx.ranks):
        return None
    made: Any = x
    if factors[i] > 1:
        times = (factors[i], 1, 0, 0, before[i])
        made = move_tokens(known, [x], 2 + i, "windows", *times)
    for j, factor in enumerate(factors):
        if factor > 1 and j != i:
            made = NewCall(torch.repeat_interleave, (made, factor, 2 + j))
    return Replace(made)


def overlapping_windows(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on Tensor.unfold along the tokens."""
    given = canonical_call(node).arguments
    x, size, step = given["input"], given["size"], given["step"]
    dim = split_dim(known, x)
    if dim is None or given["dimension"] % fake_value(x).ndim != dim:
        return None
    count = fake_value(node).shape[dim]
    ranks = known.ctx.ranks
    if is_symbol(count) or leaves_ranks_empty(count, ranks):
        return None
    even = ranks * -(-count // ranks)
    windows = move_tokens(known, [x], dim, "windows", size, step, 1, 0, even)
    cut = NewCall(torch.unflatten, (windows, dim, (-1, size)))
    first = move_tokens(known, [cut], dim, "slice", None, count, 1)
    return Replace(NewCall(torch.movedim, (first, dim + 1, -1)))


def _position(known: GraphValues, x: Any, dims: int) -> int | None:
    """Return which of the last dimensions of a value has its tokens.

    Raises: LengthNotSymbolic for a symbolic number of these.
    """
    dim = split_dim(known, x)
    first: int = fake_value(x).ndim - dims
    if dim is None or dim < first:
        return None
    if any(map(is_symbol, fake_value(x).shape)):
        raise LengthNotSymbolic("windows of tokens are dealt out for one length")
    return dim - first


def _spans(
    known: GraphValues,
    x: Any,
    dim: int,
    numbers: Sequence[int],
    count: int,
    fill: float = 0.0,
) -> NewCall | None:
    """Return the call that brings each rank the tokens of its windows.

    numbers: how far the last token of a window is from its first, steps between two
    windows, and tokens that are missing before the first. count: windows.
    """
    ranks, (reach, step, before) = known.ctx.ranks, numbers
    if is_symbol(count) or leaves_ranks_empty(count, ranks):
        return None
    own = -(-count // ranks)
    length = (own - 1) * step + reach + 1
    if length > fake_value(x).shape[dim]:
        return None  # no fewer than if it gathered all of them
    args = (length, own * step, 1, before, ranks)
    return move_tokens(known, [x], dim, "windows", *args, fill=fill)


def _first(known: GraphValues, call: NewCall, dim: int, count: int) -> Replace:
    """Return the first results of a call, without those of missing windows."""
    return Replace(move_tokens(known, [call], dim, "slice", None, count, 1))


def _at_every_token(
    known: GraphValues, call: NewCall, i: int, dim: int, count: int
) -> Decision | None:
    """Decide on a convolution that is not padded for as many results as tokens."""
    x, weight, bias, stride, padding, dilation, groups = call.args
    if leaves_ranks_empty(count, known.ctx.ranks):
        return None
    reach = dilation[i] * (fake_value(weight).shape[2 + i] - 1)
    before, after = padding[i]
    source: Any = x
    if before + after > reach:
        pads = (before, after, "constant")
        source, before, after = move_tokens(known, [x], dim, "pad", *pads), 0, 0
    missing = reach - before - after
    more = _with(padding, i, (before + missing, after))
    args = (source, weight, bias, stride, more, dilation, groups)
    result = NewCall(padded_convolution, args)
    cut = (missing, missing + count, 1)
    return Replace(move_tokens(known, [result], dim, "slice", *cut))


def _with(numbers: Sequence[Any], i: int, number: Any) -> tuple[Any, ...]:
    return (*numbers[:i], number, *numbers[i + 1 :])


RULES = {
    **dict.fromkeys(CONVOLUTIONS, strided_convolution),
    **dict.fromkeys(POOLS, pool),
    **dict.fromkeys(
        ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        adaptive_pool,
    ),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed
    ),
    "interpolate": resized,
}
