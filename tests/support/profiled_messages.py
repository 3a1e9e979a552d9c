"""What torch.profiler counts of what a process exchanges, by the names of explain."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import profile

from cpcompile.accounting.graph_account import GraphAccount, Kind

_KINDS = {
    "c10d::_allgather_base_": Kind.ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": Kind.ALL_GATHER,
    "c10d::allreduce_": Kind.ALL_REDUCE,
    "c10d::_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": Kind.REDUCE_SCATTER,
    "c10d::alltoall_base_": Kind.ALL_TO_ALL,
    "c10d::recv_": Kind.MESSAGE,
    "c10d::broadcast_": Kind.BROADCAST,
}
# Events that have the shape of what is sent, and which of their operands that is. On
# three ranks gloo computes a reduce-scatter by an all-reduce.
_SHAPED = {
    "gloo:all_gather": (Kind.ALL_GATHER, 0),
    "_c10d_functional::all_reduce": (Kind.ALL_REDUCE, 0),
    "_c10d_functional::all_reduce_": (Kind.ALL_REDUCE, 0),
    "c10d::_reduce_scatter_base_": (Kind.REDUCE_SCATTER, 1),
    "_c10d_functional::reduce_scatter_tensor": (Kind.REDUCE_SCATTER, 0),
    "gloo:recv": (Kind.MESSAGE, 0),
    "gloo:broadcast": (Kind.BROADCAST, 0),
}
_SIZES = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8,
    "int": 4, "unsigned char": 1, "bool": 1, "signed char": 1,
}  # fmt: skip


@dataclass
class Messages:
    """How many of each kind, and how many bytes a rank of `ranks` receives by them."""

    ranks: int
    rank: int
    counts: Counter[Kind] = field(default_factory=Counter)
    sizes: Counter[Kind] = field(default_factory=Counter)

    def __enter__(self) -> Messages:
        self._profile = profile(record_shapes=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        for event in self._profile.events():
            if event.name in _KINDS:
                self.counts[_KINDS[event.name]] += 1
            if event.name in _SHAPED:
                kind, place = _SHAPED[event.name]
                self.sizes[kind] += self._received(kind, _bytes(event, place))
            elif event.name == "c10d::alltoall_base_":
                self.sizes[Kind.ALL_TO_ALL] += self._from_others(event)

    def _received(self, kind: Kind, size: int) -> int:
        """From others, of what a call is handed."""
        if kind is Kind.ALL_GATHER:
            return size * (self.ranks - 1)
        if kind is Kind.ALL_REDUCE:
            return 2 * size * (self.ranks - 1) // self.ranks
        if kind is Kind.REDUCE_SCATTER:
            return size * (self.ranks - 1) // self.ranks
        return size

    def _from_others(self, event: FunctionEvent) -> int:
        size, splits = _bytes(event, 0), event.concrete_inputs[3]
        if not splits:
            ranks = event.input_shapes[0][0]  # a row of each, in their group
            return size // ranks * (ranks - 1)
        rows = sum(splits)
        return size // max(rows, 1) * (rows - splits[self.rank])


def _bytes(event: FunctionEvent, place: int) -> int:
    shape: list[int] = event.input_shapes[place]
    return math.prod(shape) * _SIZES[event.input_dtypes[place]]


def differences(accounts: Sequence[GraphAccount], profiled: Messages) -> list[str]:
    """Where explain lists something else than a profiler counts, in words.

    A mask may leave out steps of a ring when the program runs; explain lists those that
    there are at most. A rank's part of a sum is rounded to bytes, and in a bucket once
    for all calls.
    """
    listed, sizes, bounds = Counter[Kind](), Counter[Kind](), set[Kind]()
    calls = Counter[Kind]()
    for account in accounts:
        listed.update(account.messages())
        for exchange in account.exchanges:
            sizes[exchange.kind] += exchange.bytes
            calls[exchange.kind] += exchange.calls
            bounds |= {exchange.kind} if exchange.at_most else set()
    found = []
    for kind in Kind:
        for what, ours, theirs, rounding in (
            ("messages", listed[kind], profiled.counts[kind], 0),
            ("bytes", sizes[kind], profiled.sizes[kind], calls[kind]),
        ):
            less, more = theirs - rounding, theirs + rounding
            if ours < less or (ours > more and kind not in bounds):
                said = f"{kind.value}: explain lists {ours} {what}"
                found.append(f"{said}, and there are {theirs}")
    return found
