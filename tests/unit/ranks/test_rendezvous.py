"""Ranks, here threads, that meet, or learn that they do different things."""

import json
import threading
import time
from textwrap import fill

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline

from cpcompile.errors import RankMismatchError
from cpcompile.ranks import rendezvous
from cpcompile.ranks.rendezvous import Rendezvous


def together(*ranks, seconds=20.0, gone=None):
    """What each function, given its rank's Rendezvous, raises; None if nothing."""
    store = dist.HashStore()
    raised = [None] * len(ranks)

    def run(rank):
        def watch():
            return gone or (lambda missing: {})

        steps = Rendezvous(store, "g", rank, len(ranks), seconds, watch)
        try:
            ranks[rank](steps)
        except RankMismatchError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=run, args=[r]) for r in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def does(*actions):
    def run(steps):
        for action in actions:
            steps.meet(action)

    return run


def test_equal_actions_meet():
    actions = [f"runs f, call {n}" for n in range(50)]
    assert together(*[does(*actions)] * 3) == [None] * 3


def test_ranks_that_do_something_else_all_raise_one_text():
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


def test_a_difference_is_seen_before_all_have_come(monkeypatch):
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", 1.0)
    start = time.monotonic()

    def late(steps):
        steps.meet("runs f")
        time.sleep(5.0)

    texts = together(does("runs f", "runs g"), does("runs f", "runs h"), late)
    assert texts[2] is None and texts[0] == texts[1]
    assert "rank 2 is late, at last it runs f" in texts[0]
    assert time.monotonic() - start < 9.0


def test_who_only_announces_does_not_wait():
    def compiles(steps):
        steps.announce("compiles f")
        time.sleep(0.2)
        steps.check("compiles f")
        steps.meet("runs f")

    assert together(compiles, compiles) == [None] * 2


def test_who_announced_and_waits_elsewhere_learns_of_others():
    def compiles(steps):
        steps.announce("compiles f")
        while True:  # as in a wait of agreement
            steps.check("compiles f")
            time.sleep(0.01)

    texts = together(compiles, does("runs f"))
    assert texts[0] == texts[1] and "rank 0 compiles f, rank 1 runs f" in texts[0]


def test_values_that_differ_are_named_by_who_compares():
    def rank(value):
        return lambda steps: steps.meet(
            "runs f",
            str(value),
            lambda: json.dumps(value),
            lambda all_values: f"values are {', '.join(all_values)}",
        )

    assert together(rank(1), rank(1), rank(1)) == [None] * 3
    assert together(rank(1), rank(2), rank(1)) == ["values are 1, 2, 1"] * 3


def test_after_a_difference_ranks_can_meet_again():
    def rank(number):
        def run(steps):
            with pytest.raises(RankMismatchError):
                steps.meet(f"runs {number}")
            for n in range(6):
                steps.meet(f"runs together {n}")

        return run

    assert together(rank(0), rank(1)) == [None] * 2


def test_a_rank_that_does_not_come():
    texts = together(does("runs f", "runs g"), does("runs f"), seconds=0.3)
    assert texts[1] is None
    assert_expected_inline(
        fill(texts[0], 80),
        """\
rank 0 of group 'g' runs g, and after 0.3 s rank 1 does not come (the last
thing: it runs f); needed the same calls on every rank""",
    )


def test_a_rank_that_has_ended():
    start = time.monotonic()
    texts = together(
        does("runs f", "runs g"),
        does("runs f"),
        gone=lambda missing: dict.fromkeys(missing, "its process has ended"),
    )
    assert time.monotonic() - start < 10.0
    assert_expected_inline(
        fill(texts[0], 80),
        """\
rank 0 of group 'g' runs g, and rank 1 is gone: its process has ended; needed
the same calls on every rank""",
    )


def test_the_store_does_not_grow():
    store = dist.HashStore()
    steps = Rendezvous(store, "g", 0, 1, 1.0, lambda: lambda missing: {})
    counts = []
    for n in range(40):
        steps.meet(f"runs f, call {n}")
        counts.append(store.num_keys())
    assert counts[-1] == counts[7]


def test_what_the_first_rank_says_is_heard():
    heard = []

    def run(steps):
        steps.publish("key", f"rank {steps.rank}")
        steps.meet("runs f")
        heard.append(steps.published("key"))

    together(run, run, run)
    assert heard == ["rank 0"] * 3
