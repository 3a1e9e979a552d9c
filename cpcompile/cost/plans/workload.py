"""What the cost model reads of an attention call, and the ways to run it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout


class Strategy(Enum):
    """How one attention call is spread over the ranks."""

    RING = "ring"
    ALL_GATHER = "all_gather"
    ULYSSES = "ulysses"
    HYBRID = "hybrid"
    LATENTS = "latents"  # of keys that are made of something narrower
    SPLIT_KV = "split_kv"  # of few queries, which every rank has


# Strategies that options["strategy"] may name: they share out the queries. The other,
# split_kv, is chosen by itself for calls with fewer queries than ranks.
NAMED_STRATEGIES = tuple(s for s in Strategy if s is not Strategy.SPLIT_KV)

# Those that are for calls of every kind.
SEQUENCE_STRATEGIES = tuple(s for s in NAMED_STRATEGIES if s is not Strategy.LATENTS)

# Strategies for attention on DTensors outside of graphs: `config.eager_strategy` may
# name one. They need no exchange of heads, for which not every call has enough.
EAGER_STRATEGIES = (Strategy.RING, Strategy.ALL_GATHER)


class Direction(Enum):
    """Which passes of an attention call are paid for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True)
class RingWork:
    """What a mask leaves of the ring of a hybrid.

    live_fraction: share of the pairs of the slowest rank. steps: chunks of keys.
    """

    degrees: CPDegrees
    live_fraction: float
    steps: int


@dataclass(frozen=True)
class Latents:
    """What keys and values are made of, token by token, if that is narrower.

    values: how many tensors. bytes: of them, per token, over the batch. flops, moved:
    operations, and bytes read and written, to make the keys and values of a token.
    """

    values: int
    bytes: float
    flops: float
    moved: float


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
    direction: Direction
    ranks: int
    live_fraction: float = 1.0  # of the pairs that causality leaves, for other masks
    relayout: bool = False  # whether a balanced layout has to be made for this call
    masked: bool = False  # by more than causality
    mean_live_fraction: float | None = None  # of all ranks; None: as the slowest
    ring_steps: int | None = None  # chunks of keys that a mask leaves; None: all
    hybrid_rings: tuple[RingWork, ...] = ()  # of those that differ; others as the ring
    bias_bytes: int = 0  # of a mask that is a tensor, over all queries and keys
    whole_mask_bytes: int = 0  # of one that every rank computes in whole
    latents: Latents | None = None  # None: k and v are made of nothing narrower

    @property
    def has_few_queries(self) -> bool:
        """Tell whether queries cannot be shared out, as where a token is decoded."""
        # A single one is not sharded on one rank either: views could not drop it.
        return self.q_len < max(self.ranks, 2) and self.direction is Direction.FORWARD


@dataclass(frozen=True)
class Candidate:
    """One way to run a call, with its cost on the slowest rank, or why it is out.

    seconds: the whole call, in the direction of the workload.
    exposed_seconds, hidden_seconds: communication that the rank waits for, and that
        runs beside computation.
    wire_bytes: sent by one rank.
    peak_extra_bytes: beyond the rank's own q, k, v and out.
    kernels: attention kernels launched per rank in the forward.
    relayout: whether its tokens are brought into the layout for this call, and back.
    head_groups: in how many parts heads are exchanged, one after the other.
    excluded: why it cannot be used; its cost is then None unless memory is the reason,
        or what else the graph needs.
    """

    strategy: Strategy
    degrees: CPDegrees
    layout: Layout = Layout.CONTIGUOUS
    seconds: float | None = None
    exposed_seconds: float | None = None
    hidden_seconds: float | None = None
    wire_bytes: int | None = None
    peak_extra_bytes: int | None = None
    kernels: int | None = None
    relayout: bool = False
    head_groups: int = 1
    excluded: str | None = None

    @property
    def strategy_name(self) -> str:
        """The strategy in words: one rank has all tokens, and needs "none"."""
        return self.strategy.value if self.degrees.ranks > 1 else "none"

    @property
    def label(self) -> str:
        """ "ring", "hybrid 2 in 4 (ring)", "ring zigzag relaid"; "none" on one rank."""
        words = [self.strategy_name]
        if self.strategy is Strategy.HYBRID:
            words.append(str(self.degrees))
        if self.head_groups > 1:
            words.append(f"in {self.head_groups} groups of heads")
        if self.layout is not Layout.CONTIGUOUS:
            words.append(self.layout.value)
        if self.relayout:
            words.append("relaid")
        return " ".join(words)
