"""Let ranks of a group do one thing after another together, or learn that they do not.

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

import contextlib
import datetime
import time
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import RankMismatchError
from cpcompile.ranks.heartbeat import Gone, announce, watch
from cpcompile.torch_private.process_groups import get_default_store

# How long a rank that has seen a difference waits for what the others have.
GRACE_SECONDS = 10.0

# How long a rank that is about to raise stays until the others have received its error:
# its end may be the end of the store.
_RECEIVED_SECONDS = 5.0

# How often a rank that waits looks whether the others still run.
_LOOK_SECONDS = 1.0

# Counters that are in use at once: a rank that fails does not wait for the others.
_TURNS = 16

_ONLY_VALUES = "only values differ"


class Meetings:
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
        self._root = self._store = store
        self._begin_to_watch = gone

    def meet(
        self, action: str, values: str = "", details: Callable[[], str] = str
    ) -> list[str]:
        """Wait until all ranks are about to do `action` with equal `values`.

        Returns: what `details` says on every rank if only values differ, else nothing.

        Raises: RankMismatchError, with one text on all ranks that came, if they do
        different things; also if a rank has ended, or does not come in time.
        """
        with self._store_answers(action):
            if self._arrive(action, values) and self._wait(action, self.seconds, ""):
                return []
            return self._differ(action, details)

    def exchange(
        self, action: str, text: str, seconds: float, fix: str = ""
    ) -> list[str]:
        """Return the texts of all ranks, which are about to do `action`, in rank order.

        Args:
            seconds: how long this rank waits for ranks that run.
            fix: what else helps if it has waited in vain, for the error.

        Raises: RankMismatchError, as `meet`.
        """
        with self._store_answers(action):
            self._store.set(self._text_key(self.number + 1, self.rank), text)
            if not (self._arrive(action) and self._wait(action, seconds, fix)):
                self._differ(action, str)
            keys = [self._text_key(self.number, rank) for rank in range(self.size)]
            return [data.decode() for data in self._store.multi_get(keys)]

    def tell(self, action: str, text: str) -> None:
        """Say `text` in the next exchange, without waiting for the others."""
        with self._store_answers(action):
            self._store.set(self._text_key(self.number + 1, self.rank), text)
            self._arrive(action)
            self._store.add(f"received/{self.number}", 1)

    def leave(self, action: str, text: str) -> None:
        """Say `text` to those who come to the last exchange later than this rank."""
        with self._store_answers(action):
            self._store.set(self._text_key(self.number, self.rank), text)
            self._store.add(f"received/{self.number}", 1)

    def stay(self, action: str) -> None:
        """Wait a little until all ranks have received the texts of the last exchange.

        All ranks call it, or have told or left.
        """
        end = time.monotonic() + _RECEIVED_SECONDS
        with self._store_answers(action):
            received = self._store.add(f"received/{self.number}", 1)
            while received < self.size and time.monotonic() < end:
                time.sleep(0.01)
                received = self._store.add(f"received/{self.number}", 0)

    def _arrive(self, action: str, values: str = "") -> bool:
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

    def _wait(self, action: str, seconds: float, fix: str) -> bool:
        """Wait for all ranks; tell whether they came to do the same.

        It polls: store.wait cannot be interrupted, and warns when its time is over.
        """
        start = time.monotonic()
        gone_of, look = None, _LOOK_SECONDS
        who = f"rank {self.rank} of group {self.name!r} {action}"
        while abs(verdict := self._verdict()) != self.number:
            waited = time.monotonic() - start
            if waited > min(look, seconds):
                gone_of, look = (
                    gone_of or self._begin_to_watch(),
                    waited + _LOOK_SECONDS,
                )
                gone = gone_of(self._missing())
                missing = self._missing()  # one that has come since has done its part
                texts = [f"rank {r} is gone: {gone[r]}" for r in missing if r in gone]
                if texts:
                    raise RankMismatchError(f"{who}, and {'; '.join(texts)}")
                if waited > seconds and missing:
                    raise RankMismatchError(
                        f"{who}, and after {seconds:g} s {self._late(missing, fix)}"
                    )
            # No more than an eighth too long; soon after a rank that is late.
            time.sleep(min(max(waited / 8, 2e-5), 0.01 if waited < 1 else 0.05))
        return verdict > 0

    def _missing(self) -> list[int]:
        numbers = enumerate(number for number, _ in self._positions())
        return [rank for rank, number in numbers if number < self.number]

    def _late(self, ranks: list[int], fix: str) -> str:
        """Name ranks that have not come, and what the first of them did at last."""
        _, action = self._positions()[ranks[0]]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        several = f"ranks {', '.join(map(str, ranks[:8]))}{more} do"
        return (
            f"{several if len(ranks) > 1 else f'rank {ranks[0]} does'} not; needed the "
            f"same calls with the same shapes on every rank{fix}; at last rank "
            f"{ranks[0]} {action}"
        )

    def _differ(self, action: str, details: Callable[[], str]) -> list[str]:
        """Raise RankMismatchError with what differs, alike on all ranks that come.

        Returns what all ranks have where they do the same, with other values.
        """
        key = f"details/{self.number}"
        self._store.set(f"{key}/{self.rank}", details())
        positions = self._positions_of_all()
        text = _ONLY_VALUES
        if any(position != (self.number, action) for position in positions):
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
        store = self._store
        text = store.compare_set(f"failed/{self.number}", "", text).decode()
        # The counters hold what did not fit together: later meetings use others.
        self._store = dist.PrefixStore(f"after {self.number}", self._root)
        if text != _ONLY_VALUES:
            raise RankMismatchError(text)
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        store.wait(keys, datetime.timedelta(seconds=GRACE_SECONDS))
        return [data.decode() for data in store.multi_get(keys)]

    def _positions_of_all(self) -> list[tuple[int, str]]:
        """Return what every rank does; ranks that are late get some time to come."""
        deadline = time.monotonic() + GRACE_SECONDS / 4
        while self._missing() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._positions()

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

    @staticmethod
    def _text_key(number: int, rank: int) -> str:
        return f"text/{number % _TURNS}/{rank}"

    def _report(self, verdict: int) -> None:
        self._store.set(f"verdict/{self._turn}", str(verdict))

    def _verdict(self) -> int:
        return self._store.add(f"verdict/{self._turn}", 0)  # one question, unlike get

    @contextlib.contextmanager
    def _store_answers(self, action: str) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise RankMismatchError(
                f"rank {self.rank} of group {self.name!r} {action}, and the store "
                f"through which the ranks talk does not answer ({reason}): the process "
                "that holds it, rank 0 or the launcher, has ended or cannot be reached"
            ) from error


_of_groups: weakref.WeakKeyDictionary[ProcessGroup, Meetings] = (
    weakref.WeakKeyDictionary()
)


def is_alone(group: ProcessGroup) -> bool:
    """Tell whether the group has no other rank to talk to."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


def meetings_of(group: ProcessGroup) -> Meetings:
    """Return the meetings of `group`, which is no fake and has several ranks."""
    meetings = _of_groups.get(group)
    if meetings is None:
        announce()
        # A connection of our own: another thread may wait in the group's.
        store = get_default_store().clone()  # type: ignore[attr-defined]  # no stub
        name, rank = group.group_name, group.rank()
        store = dist.PrefixStore(f"cpcompile/{name}/meetings", store)
        # Groups of one name follow each other; the store may outlive them.
        number = store.add(f"groups of {rank}", 1)
        store = dist.PrefixStore(str(number), store)
        weak = weakref.ref(group)

        def gone() -> Gone:
            alive = weak()
            return watch(alive) if alive is not None else lambda ranks: {}

        meetings = Meetings(store, name, rank, group.size(), _timeout(group), gone)
        _of_groups[group] = meetings
    return meetings


def _timeout(group: ProcessGroup) -> float:
    """Return the seconds after which a message of the group fails."""
    # No public accessor, seen in 2.13.
    options = group._get_backend(group._device_types[0]).options
    return float(options._timeout.total_seconds())
