"""What torch.profiler counts of what a process exchanges, by the names of explain."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch.profiler import profile

from cpcompile.accounting.records import Kind

# Of a CPU's process group: all events of it have shapes, those of c10d have not all.
_KINDS = {
    "gloo:all_gather": Kind.ALL_GATHER,
    "gloo:all_reduce": Kind.ALL_REDUCE,
    "gloo:reduce_scatter": Kind.REDUCE_SCATTER,
    "gloo:all_to_all": Kind.ALL_TO_ALL,
    "gloo:recv": Kind.MESSAGE,
    "gloo:broadcast": Kind.BROADCAST,
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
            kind = _KINDS.get(event.name)
            if kind is None:
                continue
            self.counts[kind] += 1
            if kind is not Kind.ALL_TO_ALL:
                size = math.prod(event.input_shapes[0]) * _SIZES[event.input_dtypes[0]]
                self.sizes[kind] += self._received(kind, size)
        for event in self._profile.events():
            if event.name == "c10d::alltoall_base_":
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

    def _from_others(self, event: torch.autograd.profiler_util.FunctionEvent) -> int:
        shape, splits = event.input_shapes[0], event.concrete_inputs[3]
        size = math.prod(shape) * _SIZES[event.input_dtypes[0]]
        if not splits:
            return size // self.ranks * (self.ranks - 1)
        rows = sum(splits)
        return size // max(rows, 1) * (rows - splits[self.rank])
