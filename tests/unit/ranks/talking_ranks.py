"""Threads that are the ranks of one group, with a store of their own."""

import itertools
import threading
from typing import ClassVar

import pytest
import torch.distributed as dist

from cpcompile import config
from cpcompile.ranks import text_exchange

_names = itertools.count()


class Group:
    """What the exchanges ask of a process group."""

    def __init__(self, rank, size, name):
        self.rank, self.size = (lambda: rank), (lambda: size)
        self.group_name = name


class Watch:
    """Sees the ranks in `ended` as gone."""

    ended: ClassVar[dict[int, str]] = {}

    def __init__(self, group):
        pass

    def gone(self, ranks):
        return {r: self.ended[r] for r in ranks if r in self.ended}


class NoMeetings:
    """Ranks that do nothing together but talk; see rendezvous.py."""

    def check(self, doing):
        pass


@pytest.fixture
def talk(monkeypatch):
    """talk(fn, ranks): what `fn(group)` returns or raises on each of these ranks.

    Of `size` ranks, or of all; `seconds` is the timeout of an agreement.
    """
    store = dist.HashStore()
    monkeypatch.setattr(text_exchange, "get_default_store", lambda: store)
    monkeypatch.setattr(text_exchange, "announce", lambda: None)
    monkeypatch.setattr(text_exchange, "Watch", Watch)
    monkeypatch.setattr(text_exchange, "rendezvous_of", lambda group: NoMeetings())
    monkeypatch.setattr(text_exchange, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(text_exchange.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(Watch, "ended", {})

    def run(fn, ranks, size=None, seconds=20.0, name=None):
        name = name or f"group {next(_names)}"
        results = dict.fromkeys(ranks)

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

    run.store = store
    return run
