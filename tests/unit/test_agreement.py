"""Ranks that compile different programs get one text that says what differs."""

import threading
from textwrap import fill

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import agreement, config
from cpcompile.agreement import (
    _decode,
    _differences,
    _encode,
    check_agreement,
    from_first_rank,
    is_alike,
)
from cpcompile.errors import RanksDisagree


def description(**changes):
    items = {"options": "strategy=None", "input l_x_": "torch.float32 [2, 16]"}
    return items | {"graph": "0123456789ab"} | changes


def test_equal_descriptions_do_not_differ():
    assert _differences([description()] * 4) == []


def test_every_value_is_named_with_its_first_rank():
    seen = [
        description(),
        description(graph="ba9876543210"),
        description(options="strategy=Strategy.RING", graph="ba9876543210"),
        description(options="strategy=Strategy.RING"),
    ]
    assert_expected_inline(
        fill("; ".join(_differences(seen)), 80),
        """\
options: rank 0 has strategy=None, rank 2 has strategy=Strategy.RING; graph:
rank 0 has 0123456789ab, rank 1 has ba9876543210""",
    )


def test_an_input_that_one_rank_has_not():
    fewer = description()
    del fewer["input l_x_"]
    assert_expected_inline(
        fill("; ".join(_differences([description(), fewer])), 80),
        """input l_x_: rank 0 has torch.float32 [2, 16], rank 1 has nothing""",
    )


def test_an_input_that_only_a_later_rank_has():
    more = description(**{"input l_y_": "torch.int64 [3]"})
    assert len(_differences([description(), more])) == 1


def test_descriptions_survive_the_store():
    texts = description(options="shard=[('a', 1)], mesh=(('cp',), (8,)), x=\n\"é\"")
    assert _decode(_encode(texts).encode()) == texts


class Group:
    """What check_agreement asks of a process group, for threads as ranks."""

    def __init__(self, rank, size, name):
        self.rank, self.size = (lambda: rank), (lambda: size)
        self.group_name = name


class _AlwaysFirst(dict):
    """Ranks are processes, each with a counter of its own; here they share one."""

    def __missing__(self, name):
        return 0

    def __setitem__(self, name, number):
        pass


@pytest.fixture
def compile_on(monkeypatch):
    """compile_on(name, descriptions): what each rank, a thread, raises, or None."""
    store = dist.HashStore()
    monkeypatch.setattr(agreement, "_get_default_store", lambda: store)
    monkeypatch.setattr(agreement.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(agreement, "_compiled", _AlwaysFirst())

    def run(name, descriptions, ranks=None, seconds=20.0):
        raised = [None] * len(descriptions)

        def rank(index):
            group = Group(index, ranks or len(descriptions), name)
            try:
                # A patch holds for the thread that makes it.
                with config.patch(agreement_timeout_seconds=seconds):
                    check_agreement(group, descriptions[index])
            except RanksDisagree as error:
                raised[index] = str(error)

        threads = [
            threading.Thread(target=rank, args=[i]) for i in range(len(descriptions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    return run


def test_ranks_that_agree(compile_on):
    assert compile_on("agree", [description()] * 3) == [None] * 3


def test_ranks_that_disagree_raise_the_same_text(compile_on):
    other = description(**{"input l_x_": "torch.float32 [2, 15]"})
    texts = compile_on("disagree", [description(), other])
    assert texts[0] == texts[1]
    assert_expected_inline(
        fill(texts[0], 80),
        """\
the ranks of group 'disagree' compile different programs: input l_x_: rank 0 has
torch.float32 [2, 16], rank 1 has torch.float32 [2, 15]; needed the same inputs,
shapes and options on every rank""",
    )


def test_a_rank_that_does_not_come(compile_on):
    (text,) = compile_on("late", [description()], ranks=2, seconds=0.2)
    assert_expected_inline(
        fill(text, 80),
        """\
rank 0 of group 'late' compiles graph number 0, and after 0.2 s not all of the 2
ranks do; needed the same calls with the same shapes on every rank (or a larger
cpcompile.config.agreement_timeout_seconds)""",
    )


@pytest.mark.parametrize("outcomes", [("a", "a", "a"), ("a", "b", "a")])
def test_all_ranks_know_whether_outcomes_are_alike(compile_on, monkeypatch, outcomes):
    known = {}

    def compare(group, outcome):
        known[group.rank()] = is_alike(group, outcome)

    monkeypatch.setitem(globals(), "check_agreement", compare)
    name = f"alike {outcomes}"
    assert compile_on(name, outcomes) == [None] * 3
    assert set(known.values()) == {len(set(outcomes)) == 1} and len(known) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_rank_decides_or_says_why_not(compile_on, monkeypatch, fails):
    decided = {}

    def ask(group, description):
        def make():
            assert group.rank() == 0, "the others are not asked"
            if fails:
                raise RanksDisagree("no such profile")
            return "h100"

        decided[group.rank()] = from_first_rank(group, make)

    monkeypatch.setitem(globals(), "check_agreement", ask)
    texts = compile_on(f"decided {fails}", [None] * 3)
    if not fails:
        assert texts == [None] * 3 and decided == dict.fromkeys(range(3), "h100")
        return
    name = "decided True"
    why = f"the first rank of group {name!r} cannot go on: no such profile"
    assert texts == ["no such profile", why, why] and not decided


def test_one_rank_has_nobody_to_ask(compile_on, monkeypatch):
    monkeypatch.setattr(agreement, "_get_default_store", lambda: None)
    assert compile_on("alone", [description()]) == [None]


def test_a_fake_group_is_not_asked():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with config.patch(agreement_timeout_seconds=0.2):
            check_agreement(dist.group.WORLD, description())
    finally:
        dist.destroy_process_group()
