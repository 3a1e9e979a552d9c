"""Threads that are the ranks of one group, with a store of their own."""

import functools
import itertools
import threading
from typing import ClassVar

import pytest
import torch.distributed as dist

from cpcompile import config
from cpcompile.ranks import agreement, meetings
from cpcompile.ranks.meetings import Meetings

_names = itertools.count()


class Group:
    """What the ranks ask of a process group."""

    def __init__(self, rank, size, name):
        self.rank, self.size = (lambda: rank), (lambda: size)
        self.group_name = name


class Ended:
    """The ranks that have ended, and how."""

    ranks: ClassVar[dict[int, str]] = {}

    @classmethod
    def watch(cls):
        return lambda ranks: {r: cls.ranks[r] for r in ranks if r in cls.ranks}


@pytest.fixture
def talk(monkeypatch):
    """talk(fn, ranks): what `fn(group)` returns or raises on each of these ranks.

    Of `size` ranks, or of all; `seconds` is the timeout of an agreement and of a call.
    A group of one name keeps its meetings.
    """
    store = dist.HashStore()
    monkeypatch.setattr(meetings, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(meetings.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(Ended, "ranks", {})

    @functools.cache
    def meetings_of(name, rank, size, seconds):
        own = dist.PrefixStore(name, store)
        return Meetings(own, name, rank, size, seconds, Ended.watch)

    def run(fn, ranks, size=None, seconds=20.0, name=None):
        name = name or f"group {next(_names)}"
        results = dict.fromkeys(ranks)

        def of(group):
            return meetings_of(name, group.rank(), group.size(), seconds)

        monkeypatch.setattr(agreement, "meetings_of", of)

        def rank(index):
            try:
                # A patch holds for the thread that makes it.
                with config.patch(agreement_timeout_seconds=seconds):
                    results[index] = fn(Group(index, size or len(ranks), name))
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=rank, args=[i]) for i in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(results.values())

    run.store, run.meetings_of = store, meetings_of
    return run
