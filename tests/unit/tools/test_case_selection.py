"""Which tests a run without names takes, and pairwise cases."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import case_selection, conftest
from tests.case_selection import (
    BUDGET_SECONDS,
    LANE,
    VARIABLE,
    Durations,
    by_value,
    guards,
    lane,
    part,
    selected,
    split,
    summary,
)
from tests.support.pairwise import (
    SEED,
    all_pairs,
    covered_pairs,
    pairwise,
    selected_cases,
)
from tools import durations as recording

ROOT = case_selection.HERE.parent
A, B, C = "tests/unit/a.py::test_1", "tests/unit/a.py::test_2", "tests/cpu/b.py::test_3"
PATCH = "tests/unit/torch_patches/test_p.py::test_4"


def known(torch="2.13.0", **entries):
    return Durations(torch, {globals()[x]: y for x, y in entries.items()})


def test_what_covers_most_per_second_comes_first():
    cheap = known(A=[1, 1, {}], B=[0.9, 1, {}], C=[9, 1, {}])
    assert by_value([A, B, C], cheap, {}) == [B, C, A]  # one of each file first
    covered = known(A=[1, 1, {}, 400], B=[0.9, 1, {}, 20], C=[9, 1, {}, 1])
    assert by_value([A, B, C], covered, {}) == [A, C, B]
    assert by_value([A, B, C], covered, {B: []}) == [B, C, A]  # in place of A
    assert by_value([A, B, C], known(A=[9, 1, {}], C=[1, 1, {}]), {}) == [B, C, A]
    times = known(A=[1, 1, {}], B=[1, 1, {}], C=[2, 1, {}])
    assert lane([A, B, C], times, "1/2") == {C}
    assert lane([A, B, C], times, "2/2") == {A, B}


@pytest.mark.parametrize(
    ("first", "order"), [((), "abcde"), (("d",), "dabce"), (("e", "b"), "ebacd")]
)
def test_cases_are_spread_after_those_that_guard(first, order):
    """The first of the list, one from its middle, two from its quarters, the rest."""
    preferred = {A: [f"{A}[{x}]" for x in first]}
    chosen = by_value([f"{A}[{x}]" for x in "adceb"], known(A=[1, 5, {}]), preferred)
    assert "".join(split(x)[1] for x in chosen) == order


def test_guards():
    with pytest.raises(ValueError, match=r"guards.txt: got '.*\[x\]'; needed the id"):
        by_value([f"{A}[y]"], Durations(), {A: [f"{A}[x]"]})
    for function in guards():
        file, _, name = function.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), function


def test_the_budget_is_spent_on_what_fits():
    times = known(A=[BUDGET_SECONDS, 1, {}], B=[5, 2, {"long": 2 * BUDGET_SECONDS}])
    cases = [A, f"{B}[short]", f"{B}[long]"]
    assert selected(cases, times, {}, torch="2.13.0") == {f"{B}[short]"}
    others = selected(cases, times, {}, "all=1/1", "2.13.0")
    assert others == {A, f"{B}[long]"}
    assert selected(cases, times, {}, "all", "2.13.0") == set(cases)
    with pytest.raises(ValueError, match="got part '2'; needed K/N"):
        selected(cases, times, {}, "all=2", "2.13.0")


@pytest.mark.parametrize(("torch", "runs"), [("2.13.0", False), ("2.15.0", True)])
def test_tests_of_torch_run_when_torch_changes(torch, runs):
    times = known(PATCH=[1, 1, {}], A=[1, 1, {}])
    assert (PATCH in selected([A, PATCH], times, {}, torch=torch)) == runs
    assert PATCH in selected([A, PATCH], Durations(), {}, torch=torch)


@pytest.mark.parametrize("n", [1, 2, 7, 30])
def test_parts_are_disjoint_and_take_equally_long(n):
    seconds = {str(i): 0.1 * (i % 9) for i in range(307)}  # the last takes none
    parts = [part(seconds, f"{k}/{n}") for k in range(1, n + 1)]
    assert sorted(x for p in parts for x in p) == sorted(seconds)
    taken = [sum(seconds[x] for x in p) for p in parts]
    assert max(taken) - min(taken) <= 2 * 0.8
    with pytest.raises(ValueError, match="1 <= K <= N"):
        part(seconds, f"{n + 1}/{n}")


def test_a_new_test_runs_and_is_named():
    times = known(A=[BUDGET_SECONDS, 1, {}])
    chosen = selected([A, B], times, {}, torch="2.13.0")
    assert chosen == {B}
    first, second = summary([A, B, C], chosen, chosen, known(A=[4e4, 1, {}]))
    assert first == (
        "1 of 3 cases, 1 of 3 test functions, about 0 s; the others take an hour each "
        "with --all=K/6"
    )
    assert second.startswith("2 test functions without a recorded duration")
    assert summary([A, B], chosen, chosen, times)[1] == (
        f"1 test functions without a recorded duration, which run first, such as {B}; "
        "record them: tools/test --record tests/unit/a.py"
    )
    assert "These are guesses" in summary([A], {A}, {A}, Durations())[0]


@pytest.mark.parametrize(("named", "left"), [([], [B]), (["tests/x.py"], [A, B])])
def test_named_files_run_whole(monkeypatch, named, left):
    times = known(A=[2 * BUDGET_SECONDS, 1, {}], B=[1, 1, {}])
    monkeypatch.setattr(conftest.Durations, "read", lambda: times)
    for name in (VARIABLE, LANE):
        monkeypatch.delenv(name, raising=False)
    items = [SimpleNamespace(nodeid=x) for x in (A, B)]
    config = SimpleNamespace(
        option=SimpleNamespace(file_or_dir=named),
        hook=SimpleNamespace(pytest_deselected=lambda items: None),
        stash={},
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert [x.nodeid for x in items] == left


REPORT = """\
<testsuites><testsuite>
  <testcase classname="tests.unit.a" name="test_1" time="0.111" />
  <testcase classname="tests.unit.a" name="test_2[x]" time="0.1" />
  <testcase classname="tests.unit.a" name="test_2[y-[z]]" time="9.99" />
  <testcase classname="tests.unit.a" name="test_2[z]" time="0.1"/>
  <testcase classname="tests.unit.a" name="test_5" time="1"><failure /></testcase>
  <testcase classname="tests.cpu.b" name="test_3" time="0"><skipped /></testcase>
</testsuite></testsuites>
"""


def test_the_record(tmp_path):
    report, path = tmp_path / "report.xml", tmp_path / "durations.json"
    report.write_text(REPORT)
    timed = recording.read([report])
    recording.write({"torch": "2.13.0", "tests": recording.merged({}, timed)}, path)
    assert (
        path.read_text()
        == """\
{"torch": "2.13.0", "tests": {
 "tests/cpu/b.py": {
  "test_3": [0.0, 1, {}]
 },
 "tests/unit/a.py": {
  "test_1": [0.11, 1, {}],
  "test_2": [0.1, 3, {"y-[z]": 10.0}]
 }
}}
"""
    )
    times = Durations.read(path)
    assert [times.seconds(f"{B}{x}") for x in ("[x]", "[y-[z]]", "[new]")] == [
        0.1,
        10.0,
        0.1,
    ]
    assert not times.is_known("tests/unit/a.py::test_5")


def test_what_is_gone_is_forgotten(tmp_path):
    (tmp_path / "a.py").write_text("def test_1():\n    pass\n")
    old = {"a.py": {"test_1": [1, 1, {}], "test_2": [1, 1, {}]}, "b.py": {"test_1": []}}
    assert recording.existing(old, tmp_path) == {"a.py": {"test_1": [1, 1, {}]}}


AXES = {"strategy": "ab", "causal": (False, True), "world": (1, 2, 3, 4), "seq": "xyz"}

axes_strategy = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
    min_size=2,
    max_size=5,
)


@given(axes_strategy)
def test_every_pair_is_covered_by_few_cases_in_one_order(axes):
    cases = pairwise(axes)
    covered = {pair for case in cases for pair in covered_pairs(case)}
    assert covered == set(all_pairs(axes))
    assert all(list(case) == list(axes) for case in cases)
    largest = sorted((len(values) for values in axes.values()), reverse=True)
    assert largest[0] * largest[1] <= len(cases) <= math.prod(largest)
    assert pairwise(axes) == cases


def test_the_variable_adds_a_sample_of_the_full_product(monkeypatch):
    monkeypatch.setenv(VARIABLE, "ci")
    few = selected_cases(AXES)
    monkeypatch.setenv(VARIABLE, "all")
    monkeypatch.setenv(SEED, "7")
    more = selected_cases(AXES)
    assert few == pairwise(AXES) == more[: len(few)]
    assert len(few) < len(more) <= 2 * 2 * 4 * 3
    assert len({tuple(case.values()) for case in more}) == len(more)
    assert selected_cases(AXES) == more
    monkeypatch.setenv(SEED, "8")
    assert selected_cases(AXES) != more
