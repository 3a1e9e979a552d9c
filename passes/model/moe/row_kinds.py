"""What values are between sorting tokens by expert and bringing them back.

A tensor with a row per token is split over the ranks; sorted, its rows are mixed, but
each rank may sort its own. The kinds say which tensor is sorted by what, so that a call
on the rows of a rank has the rows of the call on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx


@dataclass(frozen=True, eq=False)
class Order:
    """A way to sort rows: that of one call. `rows`: how many there are per token."""

    call: fx.Node
    rows: int
    ascending: bool


@dataclass(frozen=True)
class Rows:
    """Dimension 0 has `per_token` rows for each token.

    order: None is that of the tokens, the rows of one after the other.
    keys: they are the keys of the order, numbers of experts.
    """

    per_token: int
    order: Order | None = None
    keys: bool = False


@dataclass(frozen=True)
class Positions:
    """Which row, or which token, is at each place of a sorted tensor."""

    order: Order
    tokens: bool


@dataclass(frozen=True)
class WayBack:
    """At which place of a sorted tensor each row is."""

    order: Order


@dataclass(frozen=True)
class Counts:
    """How many rows each expert has; a sum over the tokens."""

    order: Order | None


@dataclass(frozen=True)
class Ends:
    """Where the rows of each expert end in a sorted tensor."""

    order: Order


@dataclass(frozen=True)
class Sum:
    """A sum over the tokens."""


@dataclass(frozen=True)
class Fresh:
    """Memory with so many rows per token, made for what is written into it.

    ascending: it has the numbers 0, 1, 2 ...; zero: it is zero.
    """

    per_token: int
    ascending: bool = False
    zero: bool = False


Kind = Rows | Positions | WayBack | Counts | Ends | Sum | Fresh
Kinds = Kind | tuple[Kind, ...]
