"""The record of the simulated hybrid is what the cost model says today."""

import json

import pytest

from tools.bench import hybrid
from tools.results import RESULTS

RECORD = json.loads((RESULTS / "hybrid_plans.json").read_text())


def same(ours, recorded):
    """Whether plain data is equal, numbers to nine digits."""
    if isinstance(recorded, dict):
        return ours.keys() == recorded.keys() and all(
            same(ours[key], value) for key, value in recorded.items()
        )
    if isinstance(recorded, float):
        return ours == pytest.approx(recorded, rel=1e-9)
    return ours == recorded


def test_the_page_is_that_of_the_record():
    text = (RESULTS / "hybrid_plans.md").read_text()
    assert text == hybrid.markdown(RECORD)


def test_every_profile_length_and_number_of_ranks_is_recorded():
    cases = [(x["hardware"], x["ranks"], x["tokens"]) for x in RECORD["rows"]]
    names = dict.fromkeys(x["hardware"] for x in RECORD["states_win_from"])
    assert names.keys() == set(hybrid.profile_names())
    assert cases == [
        (n, r, t) for n in names for r in hybrid.RANKS for t in hybrid.LENGTHS
    ]


@pytest.mark.parametrize("place", range(0, len(RECORD["rows"]), 37))
def test_rows_are_those_of_today(place):
    """Change the cost model, and `python -m tools.bench hybrid` has to run again."""
    recorded = RECORD["rows"][place]
    case = recorded["hardware"], recorded["ranks"], recorded["tokens"]
    assert same(hybrid.row(RECORD["setup"]["model"], *case), recorded)


def test_crossovers_and_published_times_are_those_of_today():
    for ours, recorded in (
        (hybrid.crossovers(RECORD["setup"]["model"]), RECORD["states_win_from"]),
        (hybrid.published(), RECORD["published"]),
    ):
        assert len(ours) == len(recorded)
        assert all(map(same, ours, recorded))


def test_an_exchange_is_predicted_as_it_was_measured():
    """Within a fifth, of others' kernels on four GPUs, which nothing was fitted to."""
    ratios = [
        x["predicted"] / x["measured"]
        for x in RECORD["published"]
        if x["way"] == "exchange"
    ]
    assert all(0.8 < ratio < 1.2 for ratio in ratios)
