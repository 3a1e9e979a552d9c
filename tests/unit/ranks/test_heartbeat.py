"""Whether a rank runs: this host's system knows, or signs of life show it."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from cpcompile.ranks import heartbeat
from cpcompile.ranks.heartbeat import _started, announce, watch


@pytest.fixture
def store(monkeypatch):
    """The store that ranks write to; ranks of the group are those of the world."""
    found = dist.HashStore()
    monkeypatch.setattr(heartbeat, "get_default_store", lambda: found)
    monkeypatch.setattr(heartbeat.dist, "get_global_rank", lambda group, rank: rank)
    return dist.PrefixStore("cpcompile/heartbeat", found)


def test_a_rank_that_has_not_written_is_not_gone(store):
    assert watch(None)([0, 1]) == {}


def test_a_process_of_this_host(store):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = _started(process.pid)
    assert started
    store.set("1", f"{heartbeat._host()} {process.pid} {started} 0")
    store.set("2", f"{heartbeat._here()} 0")
    gone = watch(None)
    assert gone([1, 2]) == {}
    process.kill()
    while _started(process.pid):  # it ends soon, and stays a zombie until it is read
        time.sleep(0.01)
    why = f"its process {process.pid} on this host has ended"
    assert gone([1, 2]) == {1: why}
    process.wait()
    assert gone([1, 2]) == {1: why}


def test_another_process_with_the_same_number(store):
    store.set("1", f"{heartbeat._host()} {os.getpid()} 1 0")
    assert list(watch(None)([1])) == [1]


def test_a_silent_rank_of_another_host(store, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.05)
    gone = watch(None)
    for beat in range(3):
        store.set("1", f"elsewhere/pid 7 99 {beat}")
        time.sleep(0.06)
        assert gone([1]) == {}
    time.sleep(0.06)
    assert gone([1]) == {1: "it gave no sign of life for 0.05 s"}


def beating():
    return [t for t in threading.enumerate() if t.name == "cpcompile heartbeat"]


def test_a_rank_gives_signs_until_its_group_ends(monkeypatch):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    for name in "first", "second":
        shared = dist.HashStore()
        dist.init_process_group("gloo", store=shared, rank=0, world_size=1)
        try:
            announce()
            announce()
            (thread,) = beating()
            shown = dist.PrefixStore(
                "cpcompile/heartbeat", heartbeat.get_default_store()
            )
            signs = set()
            end = time.monotonic() + 10
            while len(signs) < 3 and time.monotonic() < end:
                signs.add(shown.get("0").decode())
            assert len(signs) >= 3, name
            assert {sign.rpartition(" ")[0] for sign in signs} == {heartbeat._here()}
        finally:
            dist.destroy_process_group()
        thread.join(10)
        assert not beating()
