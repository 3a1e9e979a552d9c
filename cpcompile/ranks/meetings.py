"""Let ranks of a group do one thing after another together, or learn that they do not.

Note [Meetings of ranks]
What ranks do together (compile, run a program, run its backward) is numbered per group.
Before the first message of number n a rank adds 1 and a hash of what it is about to do
to one counter in the store of the process group, and is told the sum. If that is no
multiple of its own hash, the ranks differ; who sees it says so in a second counter,
where the others look. If all have come, the last one says that they agree. So a rank
needs one question to the store, and those that wait for others a few more, whatever
the number of ranks. Keys are used in turns, so that the store does not grow.
What a rank does, and its text, stand in keys of its own, which are read only where
ranks differ. Every wait has an end. No wait goes through the group's own messages: a
rank that does something else would take these for its own.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import RankMismatchError
from cpcompile.ranks.heartbeat import Gone, announce, watch
from cpcompile.torch_private.distributed import get_default_store

# How long a rank that sees others do something else waits for those that are late.
GRACE_SECONDS = 2.5

# How long it waits for texts of ranks that have come and see that texts differ.
_TEXT_SECONDS = 10.0

# How long a rank that is about to raise stays until the others know why: its end may be
# the end of the store.
_RECEIVED_SECONDS = 5.0

# How often a rank that waits looks whether the others still run.
_LOOK_SECONDS = 1.0

# Keys of a meeting that are in use at once: a rank that fails does not wait for others.
_TURNS = 16

_ONLY_TEXTS = "only texts differ"


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
        self._store = store
        self._begin_to_watch = gone

    def meet(
        self, action: str, text: str = "", seconds: float | None = None, fix: str = ""
    ) -> list[str]:
        """Wait until all ranks are about to do `action`; return their texts.

        Args:
            text: of this rank; it is sent only if another rank has another one.
            seconds: how long this rank waits for ranks that run.
            fix: what else helps if it has waited in vain, for the error.

        Raises: RankMismatchError, with one text on all ranks that came, if they do
        different things; also if a rank has ended, or does not come in time.
        """
        limit = (self.seconds if seconds is None else seconds, fix)
        with self._store_answers(action):
            alike = self._arrive(action, text)
            try:
                if alike and self._wait(action, "verdict", *limit) > 0:
                    return [text] * self.size
                self._wait(action, "all", *limit, GRACE_SECONDS)
            except BaseException as error:  # those who come later must not count on us
                did = f"{action}, and has raised: {str(error) or type(error).__name__}"
                self._decide(self._difference([f"rank {self.rank} {did}"]))
                self._store.add(f"count/{self._turn}", 1 << 16)  # fits to no hash
                raise
            return self._texts(action, text)

    def tell(self, action: str, text: str) -> None:
        """Say `text` in the next meeting, without waiting for the others."""
        with self._store_answers(action):
            self._store.set(f"text/{self.number + 1}/{self.rank}", text)
            self._arrive(action, text)
            self._store.add(f"received/{self.number}", 1)

    def _arrive(self, action: str, text: str) -> bool:
        """Come to the next meeting; tell whether all that have come do the same."""
        self.number += 1
        self._be_at(action)
        mark = zlib.crc32(f"{action} {text}".encode()) >> 1
        total = self._store.add(f"count/{self._turn}", (mark << 16) + 1)
        came, marks = total & 0xFFFF, total >> 16
        alike: bool = marks == came * mark
        if not alike:
            self._store.set(f"verdict/{self._turn}", str(-self.number))
        if came == self.size:
            self._store.set(f"count/{self._turn}", "0")
            key = "verdict" if alike else "all"
            self._store.set(f"{key}/{self._turn}", str(self.number))
        return alike

    def _wait(
        self, action: str, key: str, seconds: float, fix: str, grace: float = math.inf
    ) -> int:
        """Wait until a key has the number of this meeting, or its negative; return it.

        grace: seconds after which it is enough that some rank does something else.

        It polls: store.wait cannot be interrupted, and warns when its time is over.
        """
        start = time.monotonic()
        gone_of, look = None, _LOOK_SECONDS
        who = f"rank {self.rank} of group {self.name!r} {action}"
        # One question, unlike get.
        while abs(value := self._store.add(f"{key}/{self._turn}", 0)) != self.number:
            waited = time.monotonic() - start
            if waited > min(look, seconds):
                look = waited + _LOOK_SECONDS
                here = [x for x in self._positions() if x[0] == self.number]
                if waited > grace and set(here) != {(self.number, action)}:
                    return value
                gone_of = gone_of or self._begin_to_watch()
                gone = gone_of(self._missing())
                missing = self._missing()  # one that has come since has done its part
                texts = [f"rank {r} is gone: {gone[r]}" for r in missing if r in gone]
                if texts:
                    raise RankMismatchError(
                        f"{who}, and {'; '.join(texts)}; needed the same calls on "
                        "every rank"
                    )
                if waited > seconds and missing:
                    raise RankMismatchError(
                        f"{who}, and after {seconds:g} s {self._late(missing, fix)}"
                    )
            # No more than an eighth too long; soon after a rank that is late.
            time.sleep(min(max(waited / 8, 2e-5), 0.01 if waited < 1 else 0.05))
        return value

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

    def _texts(self, action: str, text: str) -> list[str]:
        """Return the texts of all ranks; raise if they do different things."""
        store, number = self._store, self.number
        store.set(f"text/{number}/{self.rank}", text)
        first: dict[str, int] = {}
        for rank, (at, what) in enumerate(self._positions()):
            late = "" if at >= number else "is late, at last it "
            first.setdefault(late + what, rank)
        which = [f"rank {rank} {what}" for what, rank in first.items()]
        alike = list(first) == [action]
        decision = self._decide(_ONLY_TEXTS if alike else self._difference(which))
        if decision != _ONLY_TEXTS:
            raise RankMismatchError(decision)
        keys = [f"text/{number}/{rank}" for rank in range(self.size)]
        store.wait(keys, datetime.timedelta(seconds=_TEXT_SECONDS))
        texts = [data.decode() for data in store.multi_get(keys)]
        received, end = store.add(f"received/{number}", 1), time.monotonic()
        while received < self.size and time.monotonic() < end + _RECEIVED_SECONDS:
            time.sleep(0.001)
            received = store.add(f"received/{number}", 0)
        if received >= self.size:
            store.delete_key(keys[self.rank])
        return texts

    def _decide(self, text: str) -> str:
        """Return what all ranks say of this meeting: the text of the first of them.

        Each sees the others a moment later than the one before.
        """
        return self._store.compare_set(f"decided/{self.number}", "", text).decode()

    def _difference(self, which: list[str]) -> str:
        return (
            f"the ranks of group {self.name!r} do different things: "
            f"{', '.join(which)}; needed the same calls, with the same shapes and "
            "settings, in the same order on every rank (forward, backward and "
            "cp.explain)"
        )

    def _positions(self) -> list[tuple[int, str]]:
        positions = []
        for rank in range(self.size):
            key = f"at/{rank}"
            text = self._store.get(key).decode() if self._store.check([key]) else ""
            number, _, action = text.partition(" ")
            positions.append((int(number or 0), action or "has done nothing yet"))
        return positions

    def _be_at(self, action: str) -> None:
        self._store.set(f"at/{self.rank}", f"{self.number} {action}")

    @property
    def _turn(self) -> int:
        return self.number % _TURNS

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
