"""Every pair is covered, with few cases, and the variable adds a sample."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tests.case_selection import VARIABLE
from tests.support.pairwise import (
    SEED,
    all_pairs,
    covered_pairs,
    pairwise,
    selected_cases,
)

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
