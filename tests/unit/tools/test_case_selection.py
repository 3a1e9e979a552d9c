"""Which tests a run without names takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.case_selection import DAYS, VARIABLE, chosen_cases, sampled
from tests.conftest import pytest_collection_modifyitems

IDS = ["ring-2", "ring-3", "ring-30", "all_gather-2", "all_gather-3"]


@pytest.mark.parametrize(
    ("but", "every", "chosen"),
    [
        (["ring-3"], 0, {"ring-3"}),
        (["ring"], 0, set(IDS[:3])),
        (["all_gather-3", "ring-2"], 0, {"all_gather-3", "ring-2"}),
        ([], 2, {IDS[0], IDS[2], IDS[4]}),
        (["ring-3"], 4, {IDS[0], IDS[1], IDS[4]}),
    ],
)
def test_cases_are_named_or_counted(but, every, chosen):
    assert chosen_cases(IDS, but, every) == chosen


@pytest.mark.parametrize(
    ("named", "level", "left"),
    [
        ([], "", ["quick"]),
        (["tests/x.py"], "", ["quick", "slow"]),
        ([], "all", ["quick", "slow"]),
    ],
)
def test_only_named_tests_take_the_slow_ones(monkeypatch, named, level, left):
    """What pytest was given besides, as in `-p NAME`, names none."""
    items = [Item("quick"), Item("slow", {})]
    for item in items:
        item.originalname = item.name
    collected(monkeypatch, items, named, level)
    assert [item.name for item in items] == left


@pytest.mark.parametrize(("named", "left"), [([], IDS[:3]), (["tests/x.py"], IDS)])
def test_named_cases_are_not_slow(monkeypatch, named, left):
    items = [Item(x, {"but": ["ring"]}) for x in IDS]
    collected(monkeypatch, items, named)
    assert [item.name for item in items] == left


def test_the_mark_of_a_case_counts_beside_that_of_its_test(monkeypatch):
    items = [Item(x, {"but": ["ring"]}, *([{}] if x == "ring-2" else [])) for x in IDS]
    collected(monkeypatch, items, [])
    assert [item.name for item in items] == IDS[1:3]


def test_a_name_that_no_case_has_is_refused(monkeypatch):
    with pytest.raises(pytest.UsageError, match="'ulysses'; needed the begin of"):
        collected(monkeypatch, [Item(x, {"but": ["ulysses"]}) for x in IDS], [])


def collected(monkeypatch, items, named, level=""):
    monkeypatch.setenv(VARIABLE, level)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(file_or_dir=named)
    pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), items)


class Item:
    """As much of a test as is looked at; marks are the keywords of `slow`."""

    path = Path("tests/unit/test_x.py")
    originalname = "test_x"

    def __init__(self, name, *marks):
        self.name, self.marks = name, marks
        self.callspec = SimpleNamespace(id=name)

    def iter_markers(self, name):
        assert name == "slow"
        return [SimpleNamespace(kwargs=x) for x in self.marks]


def test_all_cases_run_within_some_days():
    cases = [object() for _ in range(5 * DAYS + 3)]
    days = [sampled(cases, 20261123 + day) for day in range(DAYS)]
    assert sorted(map(len, days)) == [5] * (DAYS - 3) + [6] * 3
    assert {x for day in days for x in day} == set(cases)


@pytest.mark.parametrize("count", range(1, 2 * DAYS))
def test_a_case_of_each_test_runs_every_day(count):
    cases = [object() for _ in range(count)]
    days = [sampled(cases, 20261123 + day) for day in range(DAYS)]
    assert min(map(len, days)) >= 1
    assert {x for day in days for x in day} == set(cases)
