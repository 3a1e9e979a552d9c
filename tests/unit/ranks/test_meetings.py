"""Ranks, here threads, that meet, or learn who does something else, is late or gone."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from textwrap import fill
from unittest.mock import ANY

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from cpcompile.errors import RankMismatchError
from cpcompile.ranks import agreement, heartbeat, meetings
from cpcompile.ranks.agreement import Message, exchange
from cpcompile.ranks.heartbeat import _started, announce, watch
from cpcompile.ranks.meetings import Meetings
from tests.unit.ranks.talking_ranks import Ended, Group


def does(*actions):
    def run(steps):
        for action in actions:
            steps.meet(action)

    return run


@pytest.fixture
def together(talk):
    """together(*fns): what each, given its rank's Meetings, raises; "" if nothing."""

    def run(*ranks, seconds=20.0):
        def each(group):
            steps = agreement.meetings_of(group)
            try:
                ranks[group.rank()](steps)
            except RankMismatchError as error:
                return str(error)
            return ""

        return talk(each, range(len(ranks)), seconds=seconds, name="g")

    return run


def test_ranks_that_do_something_else_all_raise_one_text(together):
    texts = together(
        does("runs f", "runs g"), does("runs f", "runs h"), does("runs f", "runs g")
    )
    assert len(set(texts)) == 1
    assert_expected_inline(
        fill(texts[0], 80),
        """\
the ranks of group 'g' do different things: rank 0 runs g, rank 1 runs h; needed
the same calls, with the same shapes and settings, in the same order on every
rank (forward, backward and cp.explain)""",
    )


def test_a_difference_is_seen_before_all_have_come(together, monkeypatch):
    monkeypatch.setattr(meetings, "GRACE_SECONDS", 1.0)
    start = time.monotonic()

    def late(steps):
        steps.meet("runs f")
        time.sleep(5.0)

    texts = together(does("runs f", "runs g"), does("runs f", "runs h"), late)
    assert texts[2] == "" and texts[0] == texts[1]
    assert "rank 2 is late, at last it runs f" in texts[0]
    assert time.monotonic() - start < 9.0


@pytest.mark.parametrize("texts", [("a", "a", "a"), ("a", "", "a"), ("a", "b", "c")])
def test_all_ranks_get_the_texts_of_all(together, texts):
    """Also of one that only tells its own."""

    def come(steps):
        steps.meet("runs f", "same")
        raise RankMismatchError(",".join(steps.meet("runs f", texts[steps.rank])))

    def tell(steps):
        steps.meet("runs f", "same")
        steps.tell("runs f", "error")

    assert together(come, come, come) == [",".join(texts)] * 3
    assert together(come, tell, come) == [f"{texts[0]},error,{texts[2]}", "", ANY]


def test_texts_that_differ_wait_for_a_rank_that_is_late(together, monkeypatch):
    monkeypatch.setattr(meetings, "GRACE_SECONDS", 0.1)

    def come(steps):
        time.sleep(2.5 * (steps.rank == 2))  # longer than others would be waited for
        raise RankMismatchError(",".join(steps.meet("runs f", f"{steps.rank}")))

    assert together(come, come, come) == ["0,1,2"] * 3


def test_the_store_does_not_grow():
    store = dist.HashStore()
    steps = Meetings(store, "g", 0, 1, 1.0, lambda: lambda missing: {})
    counts = []
    for n in range(60):
        steps.meet(f"runs f, call {n}", "a text")
        counts.append(store.num_keys())
    assert counts[-1] == counts[20]


def messages(group, seconds=20.0):
    mine = Message(f"message of {group.rank()}")
    return [m.text for m in exchange(group, mine, seconds, "compiles forward")]


def test_a_rank_that_does_not_come(talk):
    (error,) = talk(lambda group: messages(group, 0.2), [0], size=2, name="late")
    assert_expected_inline(
        fill(str(error), 80),
        """\
rank 0 of group 'late' compiles forward, and after 0.2 s rank 1 does not; needed
the same calls with the same shapes on every rank; at last rank 1 has done
nothing yet""",
    )
    # One that comes too late hears that nobody waits.
    (late,) = talk(messages, [1], size=2, name="late")
    assert "rank 0 compiles forward, and has raised: rank 0 of group" in str(late)
    assert "after 0.2 s rank 1 does not" in str(late)


def test_ranks_that_do_not_come(together, talk):
    texts = together(does("runs f", "runs g"), does("runs f"), seconds=0.3)
    assert texts[1] == ""
    assert "runs g, and after 0.3 s rank 1 does not; needed" in texts[0]
    assert texts[0].endswith("at last rank 1 runs f")
    (error,) = talk(lambda group: messages(group, 0.2), [0], size=16)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 7 more do not" in str(error)


def test_a_rank_that_is_gone(talk):
    Ended.ranks[1] = "its process 7 on this host has ended"
    start = time.monotonic()
    (error,) = talk(messages, [0], size=2, name="gone")
    assert time.monotonic() - start < 5
    assert str(error) == (
        "rank 0 of group 'gone' compiles forward, and rank 1 is gone: "
        "its process 7 on this host has ended; needed the same calls on every rank"
    )
    Ended.ranks[1] = "its process 7 on this host has ended"

    def each(group):
        if group.rank() == 2:
            time.sleep(0.3)  # the others look in the meantime
        return messages(group)

    assert len({tuple(x) for x in talk(each, range(3))}) == 1


def test_an_interrupt_ends_a_wait_and_is_heard(request, talk, monkeypatch):
    """In the main thread, because signals are handled there."""
    of = talk.meetings_of
    monkeypatch.setattr(
        agreement, "meetings_of", lambda group: of("g", group.rank(), 2, 60.0)
    )
    # a shell has its background jobs ignore it, and so would all that they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        messages(Group(0, 2, "g"), 60.0)
    assert time.monotonic() - start < 5
    with pytest.raises(RankMismatchError, match="has raised: KeyboardInterrupt"):
        messages(Group(1, 2, "g"), 5.0)


def _hold_store(connection):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()
    os._exit(0)


def test_a_dead_store_is_said_as_such():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_hold_store, args=(theirs,), daemon=True)
    process.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), wait_for_workers=False)
    steps = Meetings(store, "dead", 0, 2, 60.0, lambda: lambda missing: {})
    threading.Timer(0.3, ours.send, ("end",)).start()
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        steps.meet("compiles forward")
    process.join()
    assert time.monotonic() - start < 5
    assert str(caught.value).startswith(
        "rank 0 of group 'dead' compiles forward, and the store through which the "
        "ranks talk does not answer ("
    )
    assert str(caught.value).endswith(
        "): the process that holds it, rank 0 or the launcher, has ended or cannot be "
        "reached"
    )


@pytest.fixture
def store(monkeypatch):
    """The store that ranks write to; ranks of the group are those of the world."""
    found = dist.HashStore()
    monkeypatch.setattr(heartbeat, "get_default_store", lambda: found)
    monkeypatch.setattr(heartbeat.dist, "get_global_rank", lambda group, rank: rank)
    return dist.PrefixStore("cpcompile/heartbeat", found)


def test_what_was_written_of_a_process_counts(store):
    assert watch(None)([0, 1]) == {}
    store.set("1", f"{heartbeat._host()} {os.getpid()} 1 0")
    assert list(watch(None)([1])) == [1]


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
