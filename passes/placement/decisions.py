"""Decisions that a rule may take about a call.

A rule reads what is known of a graph and returns its decision, or None where the call
is like any other. The interpreter alone applies decisions: rules write no node and
change no state. For a call that cannot be right a rule raises RewriteError.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ..graph.new_call import NewCall, RegionCall


@dataclass(frozen=True)
class Plain:
    """Every rank makes the call on plain tensors; `call` instead, if there is one."""

    call: NewCall | None = None


@dataclass(frozen=True)
class Propagate:
    """DTensor decides the placement of the call; of `call` instead, if there is one."""

    call: NewCall | None = None


@dataclass(frozen=True)
class FallBack:
    """Gather, make the call on every rank, shard again; `call` as in Propagate."""

    reason: str
    call: NewCall | None = None


@dataclass(frozen=True)
class RunOnTokenChunks:
    """The call is made on token chunks: Note [Tokens that tp shards]."""

    call: NewCall


@dataclass(frozen=True)
class RewriteCall:
    """The node becomes this call, which is decided on anew."""

    call: NewCall


@dataclass(frozen=True)
class Alias:
    """A value whose local part is that of the node stands for the node."""

    by: fx.Node


@dataclass(frozen=True)
class Replace:
    """A value that is there, or the result of a call, stands for the node."""

    by: fx.Node | NewCall


@dataclass(frozen=True)
class Fold:
    """One call stands for the node and calls that follow from it; it is decided on."""

    region: RegionCall


@dataclass(frozen=True)
class Write:
    """Later readers of `base` read what `decision` makes of the node."""

    base: fx.Node
    decision: Propagate | FallBack | RunOnTokenChunks | Replace


Decision = (
    Plain
    | Propagate
    | FallBack
    | RunOnTokenChunks
    | RewriteCall
    | Alias
    | Replace
    | Fold
    | Write
)
