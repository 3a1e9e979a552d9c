"""Which tests a run without names takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.case_selection import QUARTER, VARIABLE, core_cases, sampled
from tests.conftest import pytest_collection_modifyitems

IDS = ["ring-2", "ring-3", "ring-30", "all_gather-2", "all_gather-3"]


@pytest.mark.parametrize(
    ("names", "every", "chosen"),
    [
        (["ring-3"], 0, ["ring-3"]),
        (["ring"], 0, IDS[:3]),
        (["all_gather-3", "ring-2"], 0, ["all_gather-3", "ring-2"]),
        ([], 2, [IDS[0], IDS[2], IDS[4]]),
    ],
)
def test_core_names_cases_or_counts_them(names, every, chosen):
    assert core_cases(IDS, *names, every=every) == chosen


@pytest.mark.parametrize(("named", "left"), [([], ["quick"]), (["tests/x.py"], None)])
def test_only_named_tests_take_the_slow_ones(monkeypatch, named, left):
    """What pytest was given besides, as in `-p NAME`, names none."""
    items = [Item("quick"), Item("slow", slow=())]
    collected(monkeypatch, items, named)
    assert [item.name for item in items] == (left or ["quick", "slow"])


@pytest.mark.parametrize(("named", "left"), [([], IDS[:3]), (["tests/x.py"], IDS)])
def test_only_named_tests_take_what_is_not_core(monkeypatch, named, left):
    items = [Item(x, core=("ring",)) for x in IDS]
    collected(monkeypatch, items, named)
    assert [item.name for item in items] == left


@pytest.mark.parametrize(
    ("level", "left"),
    [("", ["quick", "ring-2"]), ("ci", ["quick", "minutes", *IDS[:3]])],
)
def test_what_is_for_ci_is_left_out_without_it(monkeypatch, level, left):
    items = [Item("quick"), Item("minutes", ci=()), Item("slow", slow=())]
    items += [Item(x, core=("ring",), quick=("ring-2",)) for x in IDS]
    for item in items[:3]:
        item.originalname = item.name
    collected(monkeypatch, items, [], level)
    assert [item.name for item in items] == left


def test_a_name_that_no_case_has_is_refused(monkeypatch):
    with pytest.raises(pytest.UsageError, match="got 'ulysses'; needed the begin of"):
        collected(monkeypatch, [Item(x, core=("ulysses",)) for x in IDS], [])


def collected(monkeypatch, items, named, level=""):
    monkeypatch.setenv(VARIABLE, level)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    option = SimpleNamespace(file_or_dir=named)
    pytest_collection_modifyitems(SimpleNamespace(option=option, hook=hook), items)


class Item:
    """As much of a test as is looked at."""

    path = Path("tests/unit/test_x.py")
    originalname = "test_x"

    def __init__(self, name, **marks):
        self.name, self.marks = name, marks
        self.callspec = SimpleNamespace(id=name)

    def get_closest_marker(self, name):
        if name not in self.marks:
            return None
        return SimpleNamespace(args=self.marks[name], kwargs={})


def test_all_cases_run_within_some_days():
    cases = [object() for _ in range(23)]
    days = [sampled(cases, 20261123 + day) for day in range(QUARTER)]
    assert sorted(map(len, days)) == [5, 6, 6, 6]
    assert {x for day in days for x in day} == set(cases)
