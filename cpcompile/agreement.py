"""Ranks must compile the same program: a cheap check at compile time.

A rank that compiles another graph, with other shapes or options, would wait forever in
a collective that the others never start. Each rank writes a description of what it is
about to compile into the process group's store and reads those of the others.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable

import torch.distributed as dist

# The store that init_process_group made; no public accessor, seen in 2.13.
from torch.distributed.distributed_c10d import ProcessGroup, _get_default_store

from cpcompile import config
from cpcompile.errors import RanksDisagree

# How long a rank waits for the others to compile what it has compiled: they may have to
# do what it found in a cache.
COMPILE_TIMEOUT_SECONDS = 3600.0

_FAILED = "\x15"  # begins the text of an error

# How many graphs this process has compiled per group: the n-th meet each other.
_compiled: collections.Counter[str] = collections.Counter()


def check_agreement(group: ProcessGroup, description: dict[str, str]) -> None:
    """Compare what the ranks of `group` compile, item by item.

    Raises: RanksDisagree, on every rank with the same text, if an item differs, or if
    a rank does not come within config.agreement_timeout_seconds.
    """
    seconds = config.agreement_timeout_seconds
    mend = " (or a larger cpcompile.config.agreement_timeout_seconds)"
    seen = _exchange(group, description, seconds, mend)
    differences = _differences(seen)
    if differences:
        raise RanksDisagree(
            f"the ranks of group {group.group_name!r} compile different programs: "
            + "; ".join(differences)
            + "; needed the same inputs, shapes and options on every rank"
        )


def _exchange(
    group: ProcessGroup, description: dict[str, str], seconds: float, mend: str = ""
) -> list[dict[str, str]]:
    """The descriptions of all ranks, for which each waits so long."""
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return [description]
    name = group.group_name
    number = _compiled[name]
    _compiled[name] += 1
    store = dist.PrefixStore(f"cpcompile/{name}/{number}", _get_default_store())
    store.set(str(group.rank()), _encode(description))
    timeout = datetime.timedelta(seconds=seconds)
    try:
        store.wait([str(rank) for rank in range(group.size())], timeout)
    except (RuntimeError, dist.DistStoreError) as error:
        raise RanksDisagree(
            f"rank {group.rank()} of group {name!r} compiles graph number {number}, "
            f"and after {seconds} s not all of the "
            f"{group.size()} ranks do; needed the same calls with the same shapes on "
            f"every rank{mend}"
        ) from error
    return [_decode(store.get(str(rank))) for rank in range(group.size())]


def is_alike(group: ProcessGroup, outcome: str) -> bool:
    """Whether `outcome`, of a compilation, is the same text on every rank of the group.

    Called by all ranks of the group. Raises: RanksDisagree if a rank does not come.
    """
    mine = {"outcome": outcome}
    return all(x == mine for x in _exchange(group, mine, COMPILE_TIMEOUT_SECONDS))


def from_first_rank(group: ProcessGroup, make: Callable[[], str]) -> str:
    """What `make` returns on the group's first rank, on every rank.

    Called by all ranks of the group, right after `check_agreement`.

    Raises: what `make` raises; on the other ranks RanksDisagree with its text.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return make()
    name = group.group_name
    store = dist.PrefixStore(
        f"cpcompile/{name}/{_compiled[name]}/decided", _get_default_store()
    )
    if group.rank() == 0:
        try:
            value = make()
        except Exception as error:
            store.set("value", f"{_FAILED}{error}")
            raise
        store.set("value", value)
        return value
    store.wait(["value"], datetime.timedelta(seconds=config.agreement_timeout_seconds))
    value = str(store.get("value").decode())
    if value.startswith(_FAILED):
        raise RanksDisagree(
            f"the first rank of group {name!r} cannot go on: {value[len(_FAILED) :]}"
        )
    return value


def _differences(seen: list[dict[str, str]]) -> list[str]:
    """One text per item that differs, naming the first rank of each value."""
    texts = []
    for item in dict.fromkeys(item for description in seen for item in description):
        first: dict[str, int] = {}
        for rank, description in enumerate(seen):
            first.setdefault(description.get(item, "nothing"), rank)
        if len(first) > 1:
            values = ", ".join(
                f"rank {rank} has {value}" for value, rank in first.items()
            )
            texts.append(f"{item}: {values}")
    return texts


def _encode(description: dict[str, str]) -> str:
    return "\x1e".join(f"{key}\x1f{value}" for key, value in description.items())


def _decode(data: bytes) -> dict[str, str]:
    items = (item.partition("\x1f") for item in data.decode().split("\x1e"))
    return {key: value for key, _, value in items}
