"""Let ranks of a group say what they do next, and go on only if all do the same.

Note [Meetings of ranks]
What ranks do together (compile, run a program, run its backward) is numbered per group.
Before the first message of number n a rank adds 1 and a hash of what it is about to do
to one counter in the store of the process group, and is told the sum. If that is no
multiple of its own hash, the ranks differ; who sees it says so in a second counter,
where the others look. If all have come, the last one says that they agree. So a rank
needs one question to the store, and those that wait for others a few more, whatever
the number of ranks. Counters are used in turns, so that the store does not grow.
What a rank does stands in a key of its own, which is read only where ranks differ.
Every wait has an end. No wait goes through the group's own messages: a rank that does
something else would take these for its own.
"""

from __future__ import annotations

import datetime
import time
import weakref
import zlib
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import RankMismatchError
from cpcompile.ranks.heartbeat import Watch
from cpcompile.torch_private.process_groups import get_default_store

# How long a rank that has seen a difference waits for what the others have.
GRACE_SECONDS = 10.0

# How often a rank that waits looks whether the others still run.
_LOOK_SECONDS = 1.0

# Counters that are in use at once: compilations do not wait for each other here.
_TURNS = 4

Gone = Callable[[list[int]], dict[int, str]]


class Rendezvous:
    """The common actions of the ranks of one group, in order."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        size: int,
        seconds: float,
        gone: Callable[[], Gone],
    ) -> None:
        """Set up the meetings of one group.

        Args:
            store: for this group alone.
            name, rank, size: of the group.
            seconds: how long a rank waits for the others, as long as for a message.
            gone: begins to watch; returns a function that says which of some ranks have
                ended, and how.
        """
        self.name, self.rank, self.size, self.seconds = name, rank, size, seconds
        self.number = 0
        self._root = store
        self._store = store
        self._watch = gone

    def announce(self, action: str) -> None:
        """Say what this rank does next, without waiting for the others.

        Raises: RankMismatchError if another rank is known to do something else.
        """

        def arrive() -> None:
            if not self._arrive(action, ""):
                self._differ(action, None)

        self._guarded(arrive)

    def meet(
        self,
        action: str,
        values: str = "",
        details: Callable[[], str] | None = None,
        compare: Callable[[list[str]], str] | None = None,
    ) -> None:
        """Wait until all ranks are about to do `action` with equal `values`.

        Where only values differ, `details` returns what this rank has, and `compare`
        makes the text for the user from what all ranks have. Raises: RankMismatchError,
        with one text on all ranks that came; also if a rank has ended, or does not come
        in time.
        """

        def agree() -> None:
            if not (self._arrive(action, values) and self._wait(action)):
                self._differ(action, (details, compare))

        self._guarded(agree)

    def check(self, action: str) -> None:
        """Raise RankMismatchError if not all do `action`, which was announced last."""
        if self.number and self._verdict() == -self.number:
            self._guarded(lambda: self._differ(action, None))

    def publish(self, key: str, text: str) -> None:
        """Publish `text` of rank 0 to all ranks before a meeting; once per key."""
        if self.rank == 0:
            self._store.set(key, text)

    def published(self, key: str) -> str:
        """Return the text published by rank 0, after the meeting that followed."""
        return str(self._store.get(key).decode())

    def _arrive(self, action: str, values: str) -> bool:
        """Come to the next meeting; tell whether all that have come do the same."""
        self.number += 1
        self._store.set(f"at/{self.rank}", f"{self.number} {action}")
        mark = zlib.crc32(f"{action} {values}".encode()) >> 1
        total = self._store.add(f"count/{self._turn}", (mark << 16) + 1)
        came, marks = total & 0xFFFF, total >> 16
        if marks != came * mark:
            self._report(-self.number)
            return False
        if came == self.size:
            self._store.set(f"count/{self._turn}", "0")
            self._report(self.number)
        return True

    def _wait(self, action: str) -> bool:
        """Wait for all ranks; tell whether they came to do the same."""
        start = time.monotonic()
        watch, looked = None, 0.0
        while abs(verdict := self._verdict()) != self.number:
            waited = time.monotonic() - start
            if waited > looked + _LOOK_SECONDS:
                watch, looked = watch or self._watch(), waited
                self._look(watch, action)
            if waited > self.seconds:
                raise RankMismatchError(
                    f"rank {self.rank} of group {self.name!r} {action}, and after "
                    f"{self.seconds:g} s {self._late()}; needed the same calls on "
                    "every rank"
                )
            # Ctrl-C ends it; it is no more than an eighth too long.
            time.sleep(min(max(waited / 8, 2e-5), 0.01))
        return verdict > 0

    def _look(self, watch: Gone, action: str) -> None:
        """Raise RankMismatchError if a rank that has not come has ended."""
        gone = watch(self._missing())
        # One that has come since has done its part.
        texts = [f"rank {r} is gone: {gone[r]}" for r in self._missing() if r in gone]
        if texts:
            raise RankMismatchError(
                f"rank {self.rank} of group {self.name!r} {action}, and "
                f"{'; '.join(texts)}; needed the same calls on every rank"
            )

    def _missing(self) -> list[int]:
        numbers = enumerate(number for number, _ in self._positions())
        return [rank for rank, number in numbers if number < self.number]

    def _late(self) -> str:
        positions = self._positions()
        return ", ".join(
            f"rank {r} does not come (the last thing: it {positions[r][1]})"
            for r in self._missing()
        )

    def _differ(
        self,
        action: str,
        ways: tuple[Callable[[], str] | None, Callable[[list[str]], str] | None] | None,
    ) -> None:
        """Raise RankMismatchError with what differs, alike on all ranks that come."""
        details, compare = ways or (None, None)
        key = f"details/{self.number}"
        if details is not None:
            self._store.set(f"{key}/{self.rank}", details())
        positions = self._positions_of_all()
        alike = all(item == (self.number, action) for item in positions)
        if alike and compare is not None:
            keys = [f"{key}/{rank}" for rank in range(self.size)]
            self._store.wait(keys, datetime.timedelta(seconds=GRACE_SECONDS))
            text = compare([self._store.get(k).decode() for k in keys])
        else:
            first: dict[str, int] = {}
            for rank, (number, what) in enumerate(positions):
                late = "" if number >= self.number else "is late, at last it "
                first.setdefault(late + what, rank)
            which = ", ".join(f"rank {rank} {what}" for what, rank in first.items())
            text = (
                f"the ranks of group {self.name!r} do different things: {which}; "
                "needed the same calls, with the same shapes and settings, in the same "
                "order on every rank (forward, backward and cp.explain)"
            )
        text = self._store.compare_set(f"failed/{self.number}", "", text).decode()
        # The counters hold what did not fit together: later meetings use others.
        self._store = dist.PrefixStore(f"after {self.number}", self._root)
        raise RankMismatchError(text)

    def _positions_of_all(self) -> list[tuple[int, str]]:
        """Return what every rank does; ranks that are late get some time to come."""
        deadline = time.monotonic() + GRACE_SECONDS / 4
        while True:
            positions = self._positions()
            late = [number for number, _ in positions if number < self.number]
            if not late or time.monotonic() > deadline:
                return positions
            time.sleep(0.02)

    def _positions(self) -> list[tuple[int, str]]:
        positions = []
        for rank in range(self.size):
            key = f"at/{rank}"
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            number, _, action = text.partition(" ")
            positions.append((int(number or 0), action or "has done nothing yet"))
        return positions

    @property
    def _turn(self) -> int:
        return self.number % _TURNS

    def _report(self, verdict: int) -> None:
        self._store.set(f"verdict/{self._turn}", str(verdict))

    def _verdict(self) -> int:
        return self._store.add(f"verdict/{self._turn}", 0)  # one question, unlike get

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except dist.DistError as error:
            raise RankMismatchError(
                f"rank {self.rank} of group {self.name!r} cannot reach the store of "
                "the process group; the process that holds it, rank 0 or the launcher, "
                f"may have ended: {error}"
            ) from error


_of_groups: weakref.WeakKeyDictionary[ProcessGroup, Rendezvous] = (
    weakref.WeakKeyDictionary()
)


def rendezvous_of(group: ProcessGroup) -> Rendezvous:
    """Return the Rendezvous of `group`, which is no fake and has several ranks."""
    rendezvous = _of_groups.get(group)
    if rendezvous is None:
        # A connection of our own: another thread may wait in the group's.
        store = get_default_store().clone()  # type: ignore[attr-defined]  # no stub
        name, rank = group.group_name, group.rank()
        store = dist.PrefixStore(f"cpcompile/{name}/rendezvous", store)
        # Groups of one name follow each other; the store may outlive them.
        number = store.add(f"groups of {rank}", 1)
        store = dist.PrefixStore(str(number), store)
        weak = weakref.ref(group)

        def gone() -> Gone:
            alive = weak()
            return Watch(alive).gone if alive is not None else lambda ranks: {}

        rendezvous = Rendezvous(store, name, rank, group.size(), _timeout(group), gone)
        _of_groups[group] = rendezvous
    return rendezvous


def _timeout(group: ProcessGroup) -> float:
    """Return the seconds after which a message of the group fails."""
    # No public accessor, seen in 2.13.
    options = group._get_backend(group._device_types[0]).options
    return float(options._timeout.total_seconds())
