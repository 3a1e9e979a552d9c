"""Kinds of values between sorting tokens by expert and bringing them back.

A tensor with a row per token is split over the ranks; sorted, its rows are mixed, but
each rank may sort its own. The kinds say which tensor is sorted by what, so that a call
on the rows of a rank has the rows of the call on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ...graph.sequence_tokens import TokenDim


@dataclass(frozen=True, eq=False)
class Order:
    """The order in which one call sorts rows.

    rows: how many rows there are per token.
    """

    call: fx.Node
    rows: int
    ascending: bool


@dataclass(frozen=True)
class TokenRows:
    """A tensor with `per_token` rows for each token along dimension 0.

    order: None is the order of the tokens, where the rows of a token are consecutive.
    keys: whether the rows are the keys of the order: numbers of experts, none negative.
    """

    per_token: int
    order: Order | None = None
    keys: bool = False


@dataclass(frozen=True)
class CopiedRows:
    """A tensor in which every expert has a row of each token.

    dim: where the tokens are: [experts * tokens, ..] or [experts, tokens, ..].
    """

    dim: TokenDim


@dataclass(frozen=True)
class Positions:
    """Numbers that say which row or token is at each place of a sorted tensor."""

    order: Order
    tokens: bool


@dataclass(frozen=True)
class WayBack:
    """Numbers that say at which place of a sorted tensor each row is."""

    order: Order


@dataclass(frozen=True)
class Counts:
    """Numbers of rows that each expert has; a sum over the tokens."""

    order: Order | None


@dataclass(frozen=True)
class Ends:
    """Numbers that say where the rows of each expert end in a sorted tensor."""

    order: Order


@dataclass(frozen=True)
class SumOfTokens:
    """A sum over the tokens."""


@dataclass(frozen=True)
class Fresh:
    """Memory with `per_token` rows per token, made for what is written into it.

    ascending: whether it has the numbers 0, 1, 2 ...
    zero: whether it is zero.
    """

    per_token: int
    ascending: bool = False
    zero: bool = False


Kind = (
    TokenRows | CopiedRows | Positions | WayBack | Counts | Ends | SumOfTokens | Fresh
)
Kinds = Kind | tuple[Kind, ...]
