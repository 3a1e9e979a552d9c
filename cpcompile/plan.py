"""What is decided per attention call, and everything that was considered.

`Workload` is what the cost model reads of a call; `Plan` is the answer. Both are plain
frozen data: passes, logs and explain print the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Strategy(Enum):
    """How one attention call is spread over the ranks."""

    RING = "ring"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True)
class Workload:
    """One attention call over the whole sequence, as all ranks see it together."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    bytes_per_element: int
    causal: bool
    backward: bool  # whether gradients are needed too
    ranks: int


@dataclass(frozen=True)
class Candidate:
    """One strategy with its predicted cost per rank, or the reason why it is out."""

    strategy: Strategy
    seconds: float | None
    exposed_seconds: float | None  # communication that nothing hides
    peak_extra_bytes: int | None  # beyond the local q, k, v and out
    kernels: int | None  # attention kernels launched per rank, forward
    excluded: str | None = None


@dataclass(frozen=True)
class Plan:
    """The decision for one attention call; `candidates` are best first."""

    strategy: Strategy
    layout: str
    forced: bool  # the user named the strategy
    hardware: str
    candidates: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate that was chosen."""
        return next(c for c in self.candidates if c.strategy is self.strategy)

    @property
    def runner_up(self) -> Candidate | None:
        """The best possible candidate that was not chosen, if there is one."""
        others = (c for c in self.candidates if c.strategy is not self.strategy)
        return next((c for c in others if c.excluded is None), None)
