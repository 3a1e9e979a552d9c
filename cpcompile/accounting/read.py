"""Read the graphs that AOTAutograd hands to the compiler after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.fx as fx

from cpcompile.accounting.exchanges import Inputs, exchanges_of
from cpcompile.accounting.graph_account import (
    GraphAccount,
    GraphDirection,
    Joined,
    Kind,
)
from cpcompile.accounting.shared_work import Shares, work_of
from cpcompile.accounting.work_shares import shares_noted
from cpcompile.ops.comm.communication import group_by_name


@dataclass(frozen=True)
class Accounting:
    """The reader of the graphs of one compilation; `accounts` gets one for each graph.

    inputs: None reads nothing, as for a graph where nothing is sharded.
    shares: shares of the forward's calls, for the backward.
    """

    inputs: Inputs | None = None
    accounts: list[GraphAccount] = field(default_factory=list)
    shares: Shares = field(default_factory=dict)

    def read(
        self,
        module: fx.GraphModule,
        is_backward: bool,
        buckets: Mapping[Kind, Sequence[Sequence[fx.Node]]] = MappingProxyType({}),
    ) -> None:
        """Note what a graph does; nothing is changed.

        buckets: collectives of a kind that the compiler will send together.
        """
        if self.inputs is None:
            return
        direction = GraphDirection.BACKWARD if is_backward else GraphDirection.FORWARD
        exchanges = exchanges_of(module, direction, self.inputs)
        joined = [
            Joined(direction, kind, sum(map(len, of_kind)), len(of_kind))
            for kind, of_kind in buckets.items()
            if len(of_kind) < sum(map(len, of_kind))
        ]
        ranks = group_by_name(self.inputs.group).size()
        work = work_of(module, ranks, self.shares, self.inputs.key_lines)
        account = GraphAccount(direction, exchanges, work, tuple(joined))
        self.accounts.append(account)

    def tracing(self) -> AbstractContextManager[None]:
        """Return a context in which traced calls get the notes that `read` reads."""
        return nullcontext() if self.inputs is None else shares_noted(self.inputs.group)
