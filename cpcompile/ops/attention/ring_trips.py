"""The masked ring: chunks of keys go to the ranks that see any of them, and no further.

Note [Only where they are needed]
All ranks know which rank sees keys of which chunk (MaskBlocks.needed). Chunk s is at
rank s + offset in the step of an offset. Offsets at which no rank sees anything are
left out: from one to the next that is needed a chunk jumps over the ranks in between.

    window within one chunk, causal     offsets 0, 1           one message
    the same in both directions         offsets 0, 1, N - 1    two
    causal                              offsets 0 .. N - 1     N - 1

A chunk that nobody needs any more stays where it is, and with it the sum of its
gradient, which goes home from there. On a GPU all chunks take all jumps: NCCL needs
every rank of the group in its first exchange, and the slowest rank waits no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cpcompile.geometry.layout import Runs
from cpcompile.ops.comm.point_to_point import InFlight, Message, exchange
from cpcompile.ops.steps.masked_steps import MaskedGradients, MaskedRows
from cpcompile.ops.steps.online_softmax import RunningAttention


@dataclass(frozen=True)
class Trips:
    """Where every chunk goes; see Note [Only where they are needed].

    needed: by rank and source. everywhere: all chunks take all jumps.
    """

    needed: tuple[tuple[bool, ...], ...]
    everywhere: bool = False

    @property
    def ranks(self) -> int:
        return len(self.needed)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The steps: chunk s is at rank s + offset; the first is 0."""
        seen = (
            offset
            for offset in range(1, self.ranks)
            if any(self._sees(source, offset) for source in range(self.ranks))
        )
        return (0, *seen)

    def last(self, source: int) -> int:
        """The step after which a chunk goes no further."""
        if self.everywhere:
            return len(self.offsets) - 1
        steps = range(len(self.offsets))
        return max(
            (step for step in steps if self._sees(source, self.offsets[step])),
            default=0,
        )

    def source(self, rank: int, step: int) -> int:
        """The chunk that a rank has in a step, if it has one."""
        return (rank - self.offsets[step]) % self.ranks

    def goes_on(self, source: int, step: int) -> bool:
        """Whether a chunk is on its way to the next step."""
        return self.last(source) > step

    def _sees(self, source: int, offset: int) -> bool:
        return self.needed[(source + offset) % self.ranks][source]


@dataclass(frozen=True)
class MaskedRing:
    """One rank's view of the masked ring.

    own: this rank's k and v, which give the shapes of all chunks but for the keys.
    """

    rows: MaskedRows
    own: tuple[Tensor, Tensor]
    keys: Runs
    group: str
    rank: int
    trips: Trips
    place: str  # names the operator and the rank, for messages

    def is_here(self, step: int) -> bool:
        """Whether this rank has a chunk in a step."""
        return step == 0 or self.trips.goes_on(
            self.trips.source(self.rank, step), step - 1
        )

    def jump(
        self, step: int, tensors: Sequence[Tensor], dtype: torch.dtype, what: str
    ) -> InFlight:
        """Send on what is here in `step`, and receive what is here in the next one.

        tensors: two of the chunk that is here, if one is, of `dtype`.
        """
        trips = self.trips
        where = f"{what}, step {step} of {self.place}"
        if step + 1 == len(trips.offsets):
            return exchange([], [], self.group, where)
        distance = trips.offsets[step + 1] - trips.offsets[step]
        sent, received = [], []
        if trips.goes_on(trips.source(self.rank, step), step):
            sent.append(Message(tensors, (self.rank + distance) % trips.ranks))
        if self.is_here(step + 1):
            coming = self._empty(trips.source(self.rank, step + 1), dtype)
            received.append(Message(coming, (self.rank - distance) % trips.ranks))
        return exchange(sent, received, self.group, where)

    def go_home(self, ended: dict[int, list[Tensor]], dtype: torch.dtype) -> InFlight:
        """Send the sums of chunks, which went no further than here, to their ranks."""
        trips = self.trips
        sent = [Message(x, source) for source, x in ended.items()]
        received = []
        last = trips.last(self.rank)
        if last:
            end = (self.rank + trips.offsets[last]) % trips.ranks
            received.append(Message(self._empty(self.rank, dtype), end))
        where = f"dk and dv on their way home, {self.place}"
        return exchange(sent, received, self.group, where)

    def _empty(self, source: int, dtype: torch.dtype) -> list[Tensor]:
        """Two tensors of a chunk, to be received."""
        count = self.keys.count(source)
        return [
            x.new_empty((*x.shape[:2], count, x.shape[3]), dtype=dtype)
            for x in self.own
        ]


def masked_ring_forward(q: Tensor, ring: MaskedRing) -> tuple[Tensor, Tensor]:
    """out and lse of cp::ring_attention under a mask."""
    k, v = ring.own
    running = RunningAttention(q, v.shape[-1])
    chunk = [k.contiguous(), v.contiguous()]
    for step in range(len(ring.trips.offsets)):
        arriving = ring.jump(step, chunk, k.dtype, "keys and values")
        if ring.is_here(step):
            source = ring.trips.source(ring.rank, step)
            ring.rows.forward(running, chunk[0], chunk[1], source)
        chunk = [x for message in arriving.wait() for x in message]
    return running.result(True)


def masked_ring_backward(
    found: MaskedGradients, ring: MaskedRing
) -> tuple[Tensor, Tensor]:
    """dk and dv of this rank's keys, in their dtype; the rest is in `found`."""
    k, v = ring.own
    dtype, trips = found.dq.dtype, ring.trips
    chunk = [k.contiguous(), v.contiguous()]
    travelling = exchange([], [], ring.group, ring.place)
    ended: dict[int, list[Tensor]] = {}
    for step in range(len(trips.offsets)):
        arriving = ring.jump(step, chunk, k.dtype, "keys and values")
        source, totals = trips.source(ring.rank, step), []
        if ring.is_here(step):
            totals = found.of_source(chunk[0], chunk[1], source)
        for message in travelling.wait():
            totals = [total.add_(x) for total, x in zip(totals, message, strict=True)]
        travelling = ring.jump(step, totals, dtype, "dk and dv")
        if totals and not trips.goes_on(source, step):
            ended[source] = totals
        chunk = [x for message in arriving.wait() for x in message]
    own = ended.pop(ring.rank, None)
    for message in ring.go_home(ended, dtype).wait():
        own = list(message)
    assert own is not None, f"the sum of each chunk comes home: {ring.place}"
    dk, dv = (
        total.to(x.dtype, copy=True) for total, x in zip(own, (k, v), strict=True)
    )
    return dk, dv
