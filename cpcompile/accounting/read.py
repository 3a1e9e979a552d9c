"""Read the graphs that AOTAutograd hands to the compiler after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType

import torch.fx as fx
from torch import Tensor

from cpcompile.accounting.exchanges import Inputs, exchanges_of
from cpcompile.accounting.graph_account import (
    GraphAccount,
    GraphDirection,
    Joined,
    Kind,
)
from cpcompile.accounting.shared_work import Shares, work_of
from cpcompile.accounting.work_shares import shares_noted
from cpcompile.geometry.tensor_sizes import bytes_of
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
        saved = _saved_bytes(module) if is_backward else 0
        account = GraphAccount(direction, exchanges, work, tuple(joined), saved)
        self.accounts.append(account)

    def tracing(self) -> AbstractContextManager[None]:
        """Return a context in which traced calls get the notes that `read` reads."""
        return nullcontext() if self.inputs is None else shares_noted(self.inputs.group)


def _saved_bytes(backward: fx.GraphModule) -> int:
    """Return the bytes of what a backward gets that AOTAutograd has no words for.

    It describes inputs of the program, and the gradients of its results.
    """
    values = [
        node.meta.get("val")
        for node in backward.graph.find_nodes(op="placeholder")
        if node.meta.get("desc") is None
    ]
    return bytes_of([x for x in values if isinstance(x, Tensor)])
