"""Samples of a calibration: one per size, in seconds of the slowest rank.

`measure_*.py` make samples on all ranks together, `fit_*.py` turn them into the numbers
of a profile and need neither ranks nor a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class TimedExchange(Enum):
    """The exchanges that the attention operators are made of."""

    HOP = "send/recv to the next rank"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True)
class MessageSample:
    """One exchange in a group of `ranks`, in which each sends `sent_bytes` in all.

    senders: 0 for ranks of one node; else how many ranks of a node sent at once to
    another one.
    """

    kind: TimedExchange
    ranks: int
    sent_bytes: float
    seconds: float
    senders: int = 0


@dataclass(frozen=True)
class KernelSample:
    """One attention step without earlier ones: `rows` queries on `keys` keys.

    causal: the triangle of an equal number of rows and keys, instead of all pairs.
    """

    batch: int
    heads: int
    head_dim: int
    rows: int
    keys: int
    causal: bool
    backward: bool
    seconds: float

    @property
    def pairs(self) -> float:
        """(query, key) pairs that the mask leaves."""
        if self.causal:
            return self.rows * (self.rows + 1) / 2
        return self.rows * self.keys


@dataclass(frozen=True)
class SizedSample:
    """The time of an operation that takes a latency and a time per element or byte."""

    size: float
    seconds: float


@dataclass(frozen=True)
class OverlapSample:
    """A message and a computation, each alone, and both at once."""

    transfer: float
    computation: float
    together: float


@dataclass(frozen=True)
class Samples:
    """All samples of a calibration.

    copies: by bytes read and written. merges, backward_merges: by elements of the
    output, and of the queries. launches: of kernels with next to nothing to do.
    alone_speedup: of an attention step on one rank, while the others wait. speeds: of
    dtypes, by the fields of a profile.
    """

    kernels: tuple[KernelSample, ...]
    copies: tuple[SizedSample, ...]
    merges: tuple[SizedSample, ...]
    backward_merges: tuple[SizedSample, ...]
    launches: tuple[SizedSample, ...]
    messages: tuple[MessageSample, ...]
    overlaps: tuple[OverlapSample, ...]
    alone_speedup: float = 1.0
    speeds: Mapping[str, float] = field(default_factory=dict)
