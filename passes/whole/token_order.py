"""The order in which the ranks hold tokens: contiguous, or in a balanced layout.

    x [2, 8, 4] on 2 ranks     0 1 2 3 | 4 5 6 7    contiguous
                               0 1 6 7 | 2 3 4 5    zigzag

A layout is a permutation of the tokens, of which no value says anything: the shapes and
placements of a value in either order are the same. So calls on laid out tokens are the
calls on contiguous ones, but for what they cut from values that every rank has in
whole. That is cut here in the order of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.ops.dtensor.local_part import dtensor_of

from ..graph.constant_arguments import MeshAxis
from ..graph.sequence_tokens import TokenDim, token_dim

Vertex = Any
"""A node, or a part of one, whose operands and results are in one order."""


@dataclass(frozen=True)
class TokenOrder:
    """In which order the calls of a graph see their tokens.

    cp_axis: of the sequence. layout: of tokens that are laid out. lengths: of the
    sequences. calls: how many calls of attention were planned in the layout.
    laid_out: the vertices on laid out tokens. reads: by node, the vertices that its
    arguments belong to, by their place among its leaves, where that is another one than
    the node. vertices: of values that belong to another one than their node.
    """

    cp_axis: MeshAxis
    layout: Layout = Layout.CONTIGUOUS
    lengths: Sequence[int] = ()
    calls: int = 0
    laid_out: frozenset[Vertex] = frozenset()
    reads: Mapping[fx.Node, Mapping[int, Vertex]] = field(default_factory=dict)
    vertices: Mapping[fx.Node, Vertex] = field(default_factory=dict)

    def is_laid_out(self, node: fx.Node) -> bool:
        """Tell whether the tokens of a value are laid out."""
        return self.vertices.get(node, node) in self.laid_out

    def reads_laid_out(self, node: fx.Node, place: int) -> bool:
        """Tell whether a call reads laid out tokens as one of its arguments."""
        return self.reads.get(node, {}).get(place, node) in self.laid_out

    def tokens_of(self, value: Any) -> tuple[int, TokenDim] | None:
        """Return the tokens of a shard: how many there are, and in which dimension."""
        for length in self.lengths:
            dim = token_dim(value, self.cp_axis.axis, length)
            if dim is not None:
                return length, dim
        return None

    def layouts(self, laid_out: bool) -> tuple[Layout, Layout]:
        """Return the layout of an order, and the one of the other order."""
        both = Layout.CONTIGUOUS, self.layout
        return both[::-1] if laid_out else both

    def of_length(self, length: int) -> TokenLayout:
        """Return which tokens of a sequence each rank holds, laid out."""
        return TokenLayout.of(self.layout, length, self.cp_axis.size)


def in_order(x: Any, dim: TokenDim, tokens: TokenLayout) -> Any:
    """Lay out the tokens of a value, or of summands, that every rank has in whole."""
    return _picked(x, dim, tokens.length, tokens.permutation(x.device))


def in_natural_order(x: Any, dim: TokenDim, tokens: TokenLayout) -> Any:
    """Bring a value that every rank has in whole, laid out, to natural order."""
    return _picked(x, dim, tokens.length, tokens.inverse(x.device))


def _picked(x: Any, dim: TokenDim, length: int, index: Tensor) -> Any:
    where = dim.dim, dim.outer, length
    if not isinstance(x, DTensor):
        return pick_tokens(x, *where, index)
    local = pick_tokens(x._local_tensor, *where, index)
    return dtensor_of(local, x.device_mesh, x.placements, x.shape)


def relaid(x: DTensor, dim: int, source: Layout, target: Layout, group: str) -> DTensor:
    """Send the tokens of a shard to the ranks that have them in another layout."""
    how = dim, x.shape[dim], source.value, target.value, group
    moved: DTensor = torch.ops.cp.relayout(x, *how)
    return moved


def pick_tokens(x: Tensor, dim: int, outer: int, length: int, index: Tensor) -> Tensor:
    """Pick tokens of a plain tensor whose `dim` is [outer, length, inner], by index."""
    split = x.unflatten(dim, (outer, length, x.shape[dim] // (outer * length)))
    picked: Tensor = split.index_select(dim + 1, index)
    return torch.flatten(picked, dim, dim + 2)
