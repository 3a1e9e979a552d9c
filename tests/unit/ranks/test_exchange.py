"""Waits for other ranks end: with their messages, or with who is missing and why."""

import multiprocessing
import os
import signal
import threading
import time
from textwrap import fill

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from cpcompile.errors import RankMismatchError
from cpcompile.ranks import text_exchange as module
from cpcompile.ranks.text_exchange import Message, exchange
from tests.unit.ranks.talking_ranks import Group, Watch


def messages(group, seconds=20.0):
    mine = Message(f"message of {group.rank()}")
    return [w.text for w in exchange(group, mine, seconds, "compiles forward")]


def test_all_ranks_hear_all_words(talk):
    expected = [f"message of {rank}" for rank in range(3)]
    assert talk(messages, range(3)) == [expected] * 3


def test_words_of_earlier_exchanges_are_forgotten(talk):
    def each(group):
        for _ in range(20):
            messages(group)

    talk(each, range(3))
    assert talk.store.num_keys() <= 3 * 2 + 2 * 3  # counts, and the last exchanges


def test_a_rank_that_does_not_come(talk):
    (error,) = talk(lambda group: messages(group, 0.2), [0], size=2, name="late")
    assert_expected_inline(
        fill(str(error), 80),
        """\
rank 0 of group 'late' compiles forward, and after 0.2 s rank 1 does not; needed
the same calls with the same shapes on every rank""",
    )


def test_a_rank_that_comes_too_late_hears_that_nobody_waits(talk):
    talk(lambda group: messages(group, 0.2), [0], size=2, name="late")

    def late(group):
        return exchange(group, Message("late"), 20.0, "compiles forward")

    ((first, second),) = talk(late, [1], size=2, name="late")
    assert "after 0.2 s rank 1 does not" in first.error and first.final
    assert second == Message("late")


def test_many_ranks_that_do_not_come(talk):
    (error,) = talk(lambda group: messages(group, 0.2), [0], size=16)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 7 more do not" in str(error)


def test_a_rank_that_is_gone_is_named_at_once(talk):
    Watch.ended[1] = "its process 7 on this host has ended"
    start = time.monotonic()
    (error,) = talk(messages, [0], size=2, name="gone")
    assert time.monotonic() - start < 5
    assert str(error) == (
        "rank 0 of group 'gone' compiles forward, and rank 1 is gone: "
        "its process 7 on this host has ended"
    )


def test_the_word_of_a_rank_that_is_gone_counts(talk):
    Watch.ended[1] = "its process 7 on this host has ended"

    def each(group):
        if group.rank() == 2:
            time.sleep(0.3)  # the others look in the meantime
        return messages(group)

    assert len({tuple(x) for x in talk(each, range(3))}) == 1


def test_an_interrupt_ends_a_wait_and_is_heard(request, talk):
    """In the main thread, because signals are handled there."""
    group = Group(0, 2, "interrupted")
    # a shell has its background jobs ignore it, and so would all that they start
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        messages(group, 60.0)
    assert time.monotonic() - start < 5
    late = Group(1, 2, "interrupted")
    received, _ = exchange(late, Message(), 5.0, "compiles forward")
    assert received.error == "KeyboardInterrupt" and received.final


def _hold_store(connection):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    connection.recv()
    os._exit(0)


def test_a_dead_store_is_said_as_such(monkeypatch, talk):
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_hold_store, args=(theirs,), daemon=True
    )
    process.start()
    store = dist.TCPStore("127.0.0.1", ours.recv(), wait_for_workers=False)
    monkeypatch.setattr(module, "get_default_store", lambda: store)
    threading.Timer(0.3, ours.send, ("end",)).start()
    start = time.monotonic()
    with pytest.raises(RankMismatchError) as caught:
        messages(Group(0, 2, "dead"), 60.0)
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
