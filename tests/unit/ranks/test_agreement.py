"""Ranks that compile different programs get one text that says what differs."""

from textwrap import fill

import pytest
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch._dynamo.exc import RestartAnalysis
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import config
from cpcompile.errors import InputError, RankFailedError, RankMismatchError
from cpcompile.ranks import agreement
from cpcompile.ranks.agreement import (
    Attempt,
    _differences,
    attempt,
    check_agreement,
    from_first_rank,
    report_failure,
)


def description(**changes):
    items = {"options": "strategy=None", "input l_x_": "torch.float32 [2, 16]"}
    return items | {"graph": "0123456789ab"} | changes


RING = {"options": "strategy=Strategy.RING"}
OTHER = {"graph": "ba9876543210"}


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ([{}, {}, {}, {}], {}),
        (
            [{}, OTHER, RING | OTHER, RING],
            {
                "options": "rank 0 has strategy=None, rank 2 has "
                "strategy=Strategy.RING",
                "graph": "rank 0 has 0123456789ab, rank 1 has ba9876543210",
            },
        ),
        (
            [{}, {"input l_y_": "int64 [3]"}],
            {"input l_y_": "rank 0 has nothing, rank 1 has int64 [3]"},
        ),
        (
            [{"input l_y_": "int64 [3]"}, {}],
            {"input l_y_": "rank 0 has int64 [3], rank 1 has nothing"},
        ),
    ],
)
def test_every_value_is_named_with_its_first_rank(changes, texts):
    assert _differences([description(**change) for change in changes]) == texts


def compare(*descriptions):
    return lambda group: check_agreement(group, descriptions[group.rank()])


def test_ranks_that_disagree_raise_the_same_text(talk):
    other = description(**{"input l_x_": "torch.float32 [2, 15]"})
    alike = compare(description(), description())
    assert talk(alike, range(2), name="disagree") == [None] * 2
    each = compare(description(), other)
    first, second = talk(each, range(2), name="disagree")
    assert talk(alike, range(2), name="disagree") == [None] * 2  # they agree again
    assert type(first) is type(second) is RankMismatchError and str(first) == str(
        second
    )
    assert_expected_inline(
        fill(str(first), 80),
        """\
the ranks of group 'disagree' compile different programs: input l_x_: rank 0 has
torch.float32 [2, 16], rank 1 has torch.float32 [2, 15]; needed the same inputs,
shapes, options and settings on every rank: give every rank the whole tensor,
with the same dtype and requires_grad""",
    )


def test_an_error_before_the_ranks_compare(talk):
    def each(group):
        if group.rank() == 1:
            report_failure(group, InputError("no such name"), "compiles forward")
            return None
        return check_agreement(group, description(), "compiles forward")

    first, second, third = talk(each, range(3), name="early")
    assert second is None
    assert type(first) is type(third) is RankFailedError
    assert str(first) == (
        "rank 0 of group 'early' compiles forward, and rank 1 cannot: "
        "InputError: no such name"
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_rank_decides_or_says_why_not(talk, fails):
    def each(group):
        def make():
            assert group.rank() == 0, "the others are not asked"
            if fails:
                raise ValueError("no such profile")
            return "h100"

        return from_first_rank(group, make, "asks for the profile")

    outcomes = talk(each, range(3), name="decided")
    if not fails:
        assert outcomes == ["h100"] * 3
        return
    assert [type(x) for x in outcomes] == [ValueError, RankFailedError, RankFailedError]
    assert str(outcomes[2]) == (
        "rank 2 of group 'decided' asks for the profile, and rank 0 cannot: "
        "ValueError: no such profile"
    )


class Final(Exception):
    """What no other attempt fixes."""


def attempts(*makes):
    """Every rank attempts what `makes` has for it, then all compare once more."""

    def each(group):
        def make():
            made = makes[group.rank()]
            if isinstance(made, BaseException):
                raise made
            return made, {}

        found = attempt(group, make, (Final,), "compiles forward")
        check_agreement(group, {})  # the ranks have talked equally often
        return found

    return each


def test_an_attempt_that_ranks_cannot_make(talk):
    assert talk(attempts("a", "a"), range(2)) == [Attempt("a")] * 2
    errors = [TypeError("0"), TypeError("1")]
    assert talk(attempts(*errors), range(2)) == [Attempt(problem=e) for e in errors]
    first, _ = talk(attempts("a", ValueError("long " * 1000)), range(2))
    assert len(str(first.problem)) < 1200
    error = MemoryError("2 GiB")
    first, second, third = talk(attempts("a", error, "a"), range(3), name="one")
    assert second == Attempt(problem=error)
    assert first.made is third.made is None
    assert type(first.problem) is RankFailedError and not first.problem.final
    assert str(third.problem) == (
        "rank 2 of group 'one' compiles forward, and rank 1 cannot: MemoryError: 2 GiB"
    )


def test_errors_that_end_all_ranks(talk):
    final = Final("no dropout")
    outcomes = talk(attempts(TypeError("other"), "a", final), range(3))
    assert outcomes[2] is final
    for outcome in outcomes[:2]:
        assert type(outcome) is RankFailedError and outcome.final
        assert "rank 2 cannot" in str(outcome) and "Final: no dropout" in str(outcome)

    def each(group):
        items = {"plan of call 0 at layers.0": ("ring", "ulysses")[group.rank()]}
        return attempt(group, lambda: ("a", items), (), "compiles forward")

    for outcome in talk(each, range(2)):
        assert type(outcome) is RankMismatchError
        assert "layers.0: rank 0 has ring, rank 1 has ulysses" in str(outcome)


def test_dynamo_traces_again_on_all_ranks_or_on_none(talk):
    again = RestartAnalysis()
    assert talk(attempts(again, again), range(2)) == [again] * 2
    error = MemoryError("2 GiB")
    first, second, third = talk(attempts(again, error, "a"), range(3))
    assert "rank 1 cannot: MemoryError: 2 GiB" in str(first.problem)
    assert second.problem is error
    assert "rank 1 cannot: MemoryError: 2 GiB" in str(third.problem)
    first, second = talk(attempts(again, "a"), range(2))
    assert type(first.problem) is RankMismatchError
    assert "has to trace it again" in str(first.problem)
    assert "rank 0 cannot" in str(second.problem)


def test_an_interrupted_rank_does_not_wait(talk):
    (outcome,) = talk(attempts(KeyboardInterrupt()), [0], size=2, name="interrupted")
    assert type(outcome) is KeyboardInterrupt
    (outcome,) = talk(attempts("", "a"), [1], size=2, name="interrupted")
    assert type(outcome) is RankFailedError
    assert "rank 0 cannot: KeyboardInterrupt" in str(outcome)


def test_a_failure_is_heard_in_the_middle_of_an_attempt(talk):
    """One rank compares its plans, where the other has failed already."""

    def each(group):
        def make():
            if group.rank() == 1:
                raise MemoryError("2 GiB")
            check_agreement(group, {"plan": "ring"}, "compiles forward")
            return "never", {}

        found = attempt(group, make, (), "compiles forward")
        check_agreement(group, {})
        return str(found.problem)

    first, second = talk(each, range(2))
    assert "rank 1 cannot: MemoryError: 2 GiB" in first and second == "2 GiB"


def test_one_rank_has_nobody_to_ask(talk, monkeypatch):
    monkeypatch.setattr("cpcompile.ranks.meetings.get_default_store", lambda: None)
    assert talk(compare(description()), [0]) == [None]
    assert talk(attempts("a"), [0]) == [Attempt("a")]


def test_a_fake_group_is_not_asked():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with config.patch(agreement_timeout_seconds=0.2):
            check_agreement(dist.group.WORLD, description())
            assert agreement.from_first_rank(dist.group.WORLD, lambda: "a", "") == "a"
    finally:
        dist.destroy_process_group()
