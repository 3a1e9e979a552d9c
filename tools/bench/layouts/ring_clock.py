"""Time a ring: how long its steps compute, and when ranks of their own are done.

Note [Ranks of their own]
Ranks that share cores hide an imbalance: while one waits, another has its core. So the
ring of each rank is run alone, one after the other in one process: it is the function
that the operator runs, with its steps and chunks, but its messages arrive at once. What
it computes between its messages is measured. With these times the ranks are replayed
together: a rank goes on when the message that it waits for was sent. Links are taken
as infinitely fast, so that what is left is the imbalance of the computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor

from cpcompile.ops.strategies import ring_steps
from cpcompile.ops.strategies.ring_schedule import Ring

# ("work", seconds), ("send", message) to the next rank, ("receive", message) from the
# previous one; messages are numbered alike on every rank.
Event = tuple[str, float]


@contextmanager
def busy() -> Iterator[list[float]]:
    """Collect the seconds that this thread computes in each ring step called inside.

    It is processor time, which other processes on the same core do not lengthen.
    """
    seconds: list[float] = []

    def timed(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.thread_time()
            result = step(*args)
            seconds.append(time.thread_time() - start)
            return result

        return call

    steps = ("attention_step", "attention_step_backward")
    replaced = {name: timed(getattr(ring_steps, name)) for name in steps}
    with mock.patch.multiple(ring_steps, **replaced):
        yield seconds


@dataclass
class Alone:
    """One rank of a ring whose messages arrive at once; see Note [Ranks of their own].

    chunks: keys and values of every rank, as they travel.
    """

    ring: Ring
    chunks: list[list[Tensor]]
    events: list[Event] = field(default_factory=list)
    _messages: dict[int, int] = field(default_factory=dict)  # of tensors, by their id
    _arrived: list[list[Tensor]] = field(default_factory=list)
    _hops: int = 0
    _resumed: float = 0.0

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args, ring)`, ring_forward or ring_backward; fill `events`."""
        exchange = {"ring_shift": self._shift, "_wait": self._wait}
        with mock.patch.multiple(ring_steps, **exchange):
            self._resumed = time.thread_time()
            result = function(*args, self.ring)
            self._pause()
        return result

    def _pause(self) -> None:
        self.events.append(("work", time.thread_time() - self._resumed))

    def _shift(
        self, tensors: list[Tensor], group: str, where: str, after: Tensor | None = None
    ) -> list[Tensor]:
        self._pause()
        if where.startswith("keys and values"):
            self._hops += 1
            tensors = self.chunks[(self.ring.rank - self._hops) % len(self.chunks)]
        # Views, so that every message has tensors of its own; kept, so that ids are.
        arrived = [x.view(x.shape) for x in tensors]
        message = len(self._arrived)
        self._arrived.append(arrived)
        self._messages.update({id(x): message for x in arrived})
        self.events.append(("send", message))
        self._resumed = time.thread_time()
        return arrived

    def _wait(self, x: Tensor, after: Tensor | None, where: str) -> Tensor:
        self._pause()
        self.events.append(("receive", self._messages[id(x)]))
        self._resumed = time.thread_time()
        return x


def replay(ranks: list[list[Event]]) -> float:
    """Return the seconds until the last rank is done; Note [Ranks of their own].

    Raises: ValueError if a rank waits for a message that is never sent.
    """
    clocks = [0.0] * len(ranks)
    done = [0] * len(ranks)
    sent: dict[tuple[int, float], float] = {}
    while any(n < len(events) for n, events in zip(done, ranks, strict=True)):
        before = list(done)
        for rank, events in enumerate(ranks):
            previous = (rank - 1) % len(ranks)
            while done[rank] < len(events):
                kind, value = events[done[rank]]
                if kind == "work":
                    clocks[rank] += value
                elif kind == "send":
                    sent[rank, value] = clocks[rank]
                elif (previous, value) in sent:
                    clocks[rank] = max(clocks[rank], sent[previous, value])
                else:
                    break
                done[rank] += 1
        if before == done:
            raise ValueError(f"ranks wait for each other after {done} events")
    return max(clocks)
