"""Exchange messages between all ranks of a group.

It goes through the store of the process group: no collective is needed, so that ranks
whose programs differ can still talk. The n-th exchange of a rank meets the n-th of the
others. The count is kept in the store too, so that it begins anew where the store does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import RankMismatchError
from cpcompile.ranks.heartbeat import Watch, announce
from cpcompile.ranks.rendezvous import rendezvous_of
from cpcompile.torch_private.process_groups import get_default_store

# How often a rank that waits looks whether the others still run.
LOOK_SECONDS = 1.0

# How long a rank that is about to raise stays until the others have received its error:
# its end may be the end of the store.
_RECEIVED_SECONDS = 5.0


@dataclass(frozen=True)
class Message:
    """The message of one rank: `text`, or an error that keeps it from going on.

    final: whether no other way of compilation fixes the error.
    again: whether the error has Dynamo trace again.
    """

    text: str = ""
    error: str | None = None
    final: bool = False
    again: bool = False


def is_alone(group: ProcessGroup) -> bool:
    """Tell whether the group has no other rank to talk to."""
    return group.size() == 1 or dist.get_backend(group) == "fake"


def exchange(
    group: ProcessGroup, message: Message, seconds: float, doing: str, fix: str = ""
) -> list[Message]:
    """Return the messages of all ranks, in rank order; all ranks of the group call it.

    Args:
        message: that of this rank.
        seconds: how long this rank waits for ranks that run.
        doing: what it waits for, for the error: "compiles forward".
        fix: what else helps if it has waited in vain, for the error.

    Raises: RankMismatchError that names the ranks that are gone, or that do not come in
    time, or says that the store is gone.
    """
    if is_alone(group):
        return [message]
    announce()
    with _live_store(group, doing) as store:
        number = _number(group, store)
        _send(store, number, group, message)
        try:
            _wait(store, number, group, seconds, doing, fix)
        except BaseException as error:  # those who come later must not count on us
            reason = str(error) or type(error).__name__
            store.set(f"{number}/{group.rank()}", _encode(Message("", reason, True)))
            store.add(f"{number}/received", 1)
            raise
        keys = [f"{number}/{rank}" for rank in range(group.size())]
        messages = [Message(**json.loads(data)) for data in store.multi_get(keys)]
        received = store.add(f"{number}/received", 1)
        if any(rank_word.error is not None for rank_word in messages):
            end = time.monotonic() + _RECEIVED_SECONDS
            while received < group.size() and time.monotonic() < end:
                time.sleep(0.01)
                received = store.add(f"{number}/received", 0)
        if number:  # all ranks have begun this exchange, so the last one is over
            _forget(store, number - 1, group)
        return messages


def send(group: ProcessGroup, message: Message, doing: str) -> None:
    """Send this rank's message in the next exchange, without waiting for the others."""
    if is_alone(group):
        return
    with _live_store(group, doing) as store:
        number = _number(group, store)
        _send(store, number, group, message)
        store.add(f"{number}/received", 1)


@contextlib.contextmanager
def _live_store(group: ProcessGroup, doing: str) -> Iterator[dist.Store]:
    name = group.group_name
    try:
        yield dist.PrefixStore(f"cpcompile/{name}", get_default_store())
    except dist.DistError as error:
        raise RankMismatchError(
            f"rank {group.rank()} of group {name!r} {doing}, and the store through "
            f"which the ranks talk does not answer ({_first_line(error)}): the process "
            "that holds it, rank 0 or the launcher, has ended or cannot be reached"
        ) from error


def _number(group: ProcessGroup, store: dist.Store) -> int:
    return int(store.add(f"exchanges of {group.rank()}", 1)) - 1


def _send(
    store: dist.Store, number: int, group: ProcessGroup, message: Message
) -> None:
    store.set(f"{number}/{group.rank()}", _encode(message))
    if store.add(f"{number}/arrived", 1) == group.size():
        store.set(f"{number}/all", "")


def _wait(
    store: dist.Store,
    number: int,
    group: ProcessGroup,
    seconds: float,
    doing: str,
    fix: str,
) -> None:
    """Poll until all ranks have come; raise RankMismatchError if they do not.

    store.wait cannot be interrupted, and warns whenever its time is over.
    """
    start = time.monotonic()
    watch, look = Watch(group), start + LOOK_SECONDS
    who = f"rank {group.rank()} of group {group.group_name!r} {doing}"
    while not store.check([f"{number}/all"]):
        now = time.monotonic()
        if now >= min(look, start + seconds):
            look = now + LOOK_SECONDS
            rendezvous_of(group).check(doing)
            gone = watch.gone(_missing(store, number, group))
            missing = _missing(store, number, group)  # one may have come, and ended
            if not missing:
                return
            reasons = [f"rank {r} is gone: {gone[r]}" for r in missing if r in gone]
            if reasons:
                raise RankMismatchError(f"{who}, and {'; '.join(reasons)}")
            if now >= start + seconds:
                raise RankMismatchError(
                    f"{who}, and after {seconds:g} s {_ranks(missing)} not; needed the "
                    f"same calls with the same shapes on every rank{fix}"
                )
        time.sleep(min(0.05, max(0.0005, (now - start) / 20)))


def _missing(store: dist.Store, number: int, group: ProcessGroup) -> list[int]:
    ranks = range(group.size())
    return [rank for rank in ranks if not store.check([f"{number}/{rank}"])]


def _ranks(ranks: list[int]) -> str:
    """Return "rank 1 does" or "ranks 1, 2 do"; only the first eight of many ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} do"


def _forget(store: dist.Store, number: int, group: ProcessGroup) -> None:
    shared = ["arrived", "all", "received"] if group.rank() == 0 else []
    for key in [str(group.rank()), *shared]:
        store.delete_key(f"{number}/{key}")


def _encode(message: Message) -> str:
    return json.dumps(asdict(message))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
