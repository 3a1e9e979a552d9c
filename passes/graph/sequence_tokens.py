"""Describe where the tokens of a sequence lie in a distributed value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from cpcompile.geometry.lengths import Size, expected, is_symbol
from cpcompile.torch_private.distributed import StridedShard


@dataclass(frozen=True)
class TokenDim:
    """A dimension with tokens: `dim` of a tensor is [outer, tokens, inner], flattened.

    outer is not 1 where batch and sequence are one dimension, as after
    `x.view(batch * tokens, channels)`.
    """

    dim: int
    outer: int = 1

    @property
    def placement(self) -> Placement:
        """Placement by which DTensor splits the tokens."""
        if self.outer == 1:
            return Shard(self.dim)
        return StridedShard(self.dim, split_factor=self.outer)


@dataclass(frozen=True)
class SequenceDim:
    """The sequence of a value: `tokens` tokens, in dimension `dim`."""

    dim: TokenDim
    tokens: int


@dataclass(frozen=True)
class TokenAxis:
    """An axis of tokens: dimension `dim` has outer * n * inner elements, for n tokens.

    Shapes of one value, n = 6 tokens:

        [2, 6, 5]   TokenAxis(1)      [12, 5]    TokenAxis(0, outer=2)    flattened
        [6, 2, 5]   TokenAxis(0)      [12, 5]    TokenAxis(0, inner=2)    flattened
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, tokens: int) -> int:
        """Return the number of elements of the dimension for a number of tokens."""
        return self.outer * tokens * self.inner

    def moved(self, dim: int) -> TokenAxis:
        """Return the axis of the same tokens in another dimension."""
        return TokenAxis(dim, self.outer, self.inner)


class Wanted(StrEnum):
    """What ranks should hold of a value, which a `constraint` in a graph names."""

    OWN_ROWS = "own rows"  # their own entries of `dim`, as they are
    ALL_ROWS = "all rows"  # all entries of `dim`
    KEY_SOURCE = "key source"  # all of it, to compute keys of all tokens from
    COMPUTED_KEYS = "computed keys"  # keys or values of all tokens, computed there
    EXCHANGED = "exchanged"  # entries of `target` for those of `dim`; all with None

    __repr__ = str.__repr__  # as a graph prints it


def constraint(
    x: Tensor, wanted: Wanted, dim: int | None = None, target: int | None = None
) -> Tensor:
    """Return x; mark in a graph what ranks should hold of it, for keep_calls.

    dim: the dimension that has the entries, mostly tokens; None if none has.
    """
    return x


def wanted_of(node: fx.Node) -> Wanted | None:
    """Return what a node that is a constraint wants; None of other nodes."""
    return node.args[1] if node.target is constraint else None  # type: ignore[return-value]


def is_row_parallel_operand(node: fx.Node) -> bool:
    """Tell whether a node marks an operand of attention by rows."""
    return wanted_of(node) in (Wanted.OWN_ROWS, Wanted.ALL_ROWS)


def token_dim(value: Any, axis: int, tokens: int) -> TokenDim | None:
    """Return the dimension of `value` that the mesh axis splits, if it has the tokens.

    tokens: their number. None also where the size of the dimension is a symbol.
    """
    if not isinstance(value, DTensor):
        return None
    placement = value.placements[axis]
    dim = getattr(placement, "dim", None)
    if dim is None or dim >= value.ndim:  # DTensor forgets that an index drops a dim
        return None
    outer = getattr(placement, "split_factor", 1)
    for other, other_placement in enumerate(value.placements):
        if other != axis and getattr(other_placement, "dim", None) == dim:
            if other > axis or not isinstance(placement, StridedShard):
                return None  # ranks of two axes share the tokens
            outer *= value.device_mesh.size(other)
    whole, size = outer * tokens, expected(value.shape[dim])
    if is_symbol(value.shape[dim]) or not size or size % whole:
        return None
    if size != whole and tokens % value.device_mesh.size(axis):
        return None  # the ranks are not cut between tokens
    return TokenDim(dim, outer)


def candidate_dims(shape: Sequence[Size], tokens: int) -> list[TokenDim]:
    """List the dimensions of a shape that may be those of the tokens, by their size."""
    dims = []
    for dim, own in enumerate(shape):
        size = expected(own)
        if size and size % tokens == 0 and not is_symbol(own):
            dims.append(TokenDim(dim))
            if size > tokens:
                dims.append(TokenDim(dim, size // tokens))
    return dims
