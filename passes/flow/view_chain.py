"""Follow a tensor back through calls that only move or repeat its elements.

    k [B, G, S, D] -> unsqueeze(2) -> expand(B, G, n, S, D) -> reshape(B, G * n, S, D)
      ->  dimensions (B), (G, n copies), (S), (D) of k

A dimension is a product of factors, the outermost first: parts of the dimensions of the
tensor where the chain begins, and numbers of copies. They are read from the shapes of
the fake values, so that it does not matter in which words a model writes this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import Size, is_symbol

from ..graph.calls import canonical_call, spelled
from ..graph.nodes import fake_value
from .dim_rules import ORDERS, order_of

Extent = Any  # an int, or the sympy expression of a symbolic length


@dataclass(frozen=True)
class Factor:
    """A factor of a dimension: `extent` indices of dimension `dim`, `stride` apart.

    dim is one of the tensor where the chain begins. It is None for copies: the index
    does not matter.
    """

    dim: int | None
    stride: int
    extent: Extent


Dims = tuple[tuple[Factor, ...], ...]


@dataclass(frozen=True)
class Link:
    """A node of a chain, and what its dimensions are made of."""

    node: fx.Node
    dims: Dims


def follow(node: fx.Node) -> list[Link]:
    """Return the chain that ends with `node`, its beginning first."""
    nodes = [node]
    while (call := canonical_call(nodes[-1])).name in _STEPS:
        before = call.arguments["input"]
        if not isinstance(before, fx.Node) or not _alike(before, nodes[-1]):
            break
        nodes.append(before)
    links: list[Link] = []
    for step in reversed(nodes):
        dims = _after(links[-1], step) if links else None
        if dims is None:  # a call that cannot be followed begins a chain
            links = []
            dims = _begin(fake_value(step))
        links.append(Link(step, dims))
    return links


def is_copies(factor: Factor) -> bool:
    """Tell whether a factor repeats what it stands beside."""
    return factor.dim is None


def _alike(before: fx.Node, after: fx.Node) -> bool:
    """Tell whether two nodes may hold the same elements, with the same gradients."""
    x, y = fake_value(before), fake_value(after)
    return (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and (x.dtype, x.device, x.requires_grad) == (y.dtype, y.device, y.requires_grad)
        and 0 not in _extents(x)
    )


def _begin(value: Tensor) -> Dims:
    return tuple(
        () if n == 1 else (Factor(dim, 1, n),) for dim, n in enumerate(_extents(value))
    )


def _after(last: Link, node: fx.Node) -> Dims | None:
    """Return the dimensions of a node whose first argument is the last link's.

    None if they cannot be followed.
    """
    shape = _extents(fake_value(node))
    dims = _STEPS[spelled(node)](node, last.dims, shape)
    if dims is None:
        return None
    dims = tuple(map(_merged, dims))
    return dims if [_extent_of(dim) for dim in dims] == shape else None


def _extents(value: Tensor) -> list[Extent]:
    return [_extent(n) for n in value.shape]


def _extent(n: Size) -> Extent:
    return n.node.expr if is_symbol(n) else int(n)  # type: ignore[union-attr]  # a symbol is a SymInt


def _extent_of(dim: tuple[Factor, ...]) -> Extent:
    return math.prod(factor.extent for factor in dim)


def _copies(n: int) -> tuple[Factor, ...]:
    return () if n == 1 else (Factor(None, 0, n),)


def _merged(dim: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Merge neighbours that are one stretch of a dimension into one factor."""
    merged: list[Factor] = []
    for factor in dim:
        outer = merged[-1] if merged else None
        if (
            outer is not None
            and outer.dim == factor.dim
            and outer.stride == factor.stride * factor.extent
        ):
            extent = outer.extent * factor.extent
            merged[-1] = Factor(factor.dim, factor.stride, extent)
        else:
            merged.append(factor)
    return tuple(merged)


def _regrouped(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    """Deal factors out to the new dimensions; the elements keep their order."""
    factors = [factor for dim in dims for factor in dim]
    result = []
    for extent in shape:
        taken: list[Factor] = []
        remaining = extent
        while remaining != 1:
            if not factors:
                return None
            factor = factors.pop(0)
            numbers = isinstance(remaining, int) and isinstance(factor.extent, int)
            if factor.extent == remaining:
                remaining = 1
            elif numbers and remaining % factor.extent == 0:
                remaining //= factor.extent
            elif numbers and factor.extent % remaining == 0:
                inner = factor.extent // remaining
                factors.insert(0, Factor(factor.dim, factor.stride, inner))
                factor = Factor(factor.dim, factor.stride * inner, remaining)
                remaining = 1
            else:
                return None
            taken.append(factor)
        result.append(tuple(taken))
    return None if factors else tuple(result)


def _indexed(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    """Follow x[:, :, None] and the like, which leave nothing out."""
    index = canonical_call(node).arguments["index"]
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(i is None or i is ... or i == slice(None) for i in parts)
    return _regrouped(node, dims, shape) if whole else None


def _permuted(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    order = order_of(node)
    return None if order is None else tuple(dims[d] for d in order)


def _expanded(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    padded = ((),) * (len(shape) - len(dims)) + dims
    if any(not dim and not isinstance(n, int) for dim, n in _pairs(padded, shape)):
        return None  # as many copies as a symbolic length
    return tuple(dim or _copies(n) for dim, n in _pairs(padded, shape))


def _pairs(
    dims: Dims, shape: Sequence[Extent]
) -> list[tuple[tuple[Factor, ...], Extent]]:
    return list(zip(dims, shape, strict=True))


def _interleaved(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    """Repeat every index n times in a row: the copies are the innermost factor."""
    arguments = canonical_call(node).arguments
    repeats, dim = arguments["repeats"], arguments["dim"]
    if not isinstance(repeats, int) or not isinstance(dim, int):
        return None
    changed = list(dims)
    changed[dim] = dims[dim] + _copies(repeats)
    return tuple(changed)


def _tiled(node: fx.Node, dims: Dims, shape: Sequence[Extent]) -> Dims | None:
    """Repeat the whole dimension n times: the copies are the outermost factor."""
    _, counts = canonical_call(node).arguments.values()
    if not all(isinstance(n, int) for n in counts):
        return None
    missing = max(len(shape) - len(counts), 0)
    counts = (1,) * missing + tuple(counts)
    padded = ((),) * (len(shape) - len(dims)) + dims
    pairs = zip(counts, padded, strict=True)
    return tuple(_copies(n) + dim for n, dim in pairs)


DimRule = Callable[[fx.Node, Dims, Sequence[Extent]], Dims | None]

_STEPS: dict[str, DimRule] = {
    **dict.fromkeys(
        ("contiguous", "clone", "to", "view", "reshape", "view_as", "reshape_as",
         "flatten", "unflatten", "unsqueeze", "squeeze"),
        _regrouped,
    ),
    **dict.fromkeys(ORDERS, _permuted),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    "repeat_interleave": _interleaved,
    **dict.fromkeys(("repeat", "tile"), _tiled),
    "getitem": _indexed,
}  # fmt: skip
