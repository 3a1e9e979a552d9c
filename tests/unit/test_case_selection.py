"""Few cases are chosen, with all values; those that take long only where they must."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.case_selection import INDUCTOR, chosen_cases
from tests.conftest import pytest_collection_modifyitems


def case(*values):
    """A case with these values on axes 0, 1, ..."""
    found = {(str(axis), str(value)) for axis, value in enumerate(values)}
    return frozenset(found | ({INDUCTOR} if "inductor" in values else set()))


def product(*axes):
    return {"-".join(map(str, x)): case(*x) for x in itertools.product(*axes)}


def values(cases, names):
    return frozenset().union(*(cases[name] for name in names))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(4, 9))
def test_every_value_has_a_case(sizes, limit):
    cases = product(*map(range, sizes))
    chosen = chosen_cases(cases, limit)
    assert values(cases, chosen) == values(cases, cases)
    assert len(chosen) == len(set(chosen)) == min(limit, len(cases))


def test_it_does_not_depend_on_the_order():
    cases = product("abc", "xyz", range(3))
    backwards = dict(reversed(cases.items()))
    assert chosen_cases(cases, 5) == chosen_cases(backwards, 5)


def test_one_case_goes_through_inductor():
    cases = product("abc", ("inductor", "aot_eager"), range(3))
    first, *others = chosen_cases(cases, 6)
    assert "inductor" in first
    assert len(others) == 5 and not any("inductor" in name for name in others)


def test_more_go_through_inductor_for_values_that_only_they_have():
    cases = product("ab", ("aot_eager",)) | product("cd", ("inductor",))
    assert set(chosen_cases(cases, 4)) == set(cases)


def test_two_ranks_where_they_will_do():
    cases = {
        f"{world}-{seq}": frozenset({("case world", str(world)), ("seq", str(seq))})
        for world in (1, 2, 3, 4)
        for seq in (8, 9)
    }
    chosen = chosen_cases(cases, 5)
    assert [name[0] for name in chosen[:1] + chosen[4:]] == ["2", "2"]
    assert {name[0] for name in chosen} == set("1234")


def test_no_more_than_the_limit():
    assert len(chosen_cases(product(range(40)), 10)) == 10


@pytest.mark.parametrize(("named", "left"), [([], ["quick"]), (["tests/x.py"], None)])
def test_only_named_tests_take_the_slow_ones(monkeypatch, named, left):
    """What pytest was given besides, as in `-p NAME`, names none."""
    monkeypatch.delenv("CPCOMPILE_ALL_TESTS", raising=False)
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(option=SimpleNamespace(file_or_dir=named), hook=hook)
    items = [Item("quick", slow=False), Item("slow", slow=True)]
    pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == (left or ["quick", "slow"])


class Item:
    """As much of a test as is looked at."""

    path = Path("tests/unit/test_x.py")

    def __init__(self, name, slow):
        self.name, self.slow = name, slow

    def get_closest_marker(self, name):
        return self.slow or None
