"""The scorer itself, on made-up tables."""

from __future__ import annotations

import pytest

from cpcompile.cost.plans import Candidate, Strategy
from cpcompile.geometry.degrees import CPDegrees
from tests.cost.scoring import Score, Shape


def made(predicted: dict[str, float], measured: dict[str, float]) -> Shape:
    """A shape whose forms differ in seconds only."""
    forms = {
        name: Candidate(
            Strategy.RING,
            CPDegrees(1, 8),
            seconds=seconds,
            peak_extra_bytes=0,
            kernels=1,
        )
        for name, seconds in predicted.items()
    }
    return Shape("made", forms, measured)


def test_regret_is_what_the_choice_costs() -> None:
    right = made({"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 11.0})
    wrong = made({"a": 1.0, "b": 2.0}, {"a": 15.0, "b": 10.0})
    assert (right.chosen, right.best, right.regret) == ("a", "a", 0)
    assert (wrong.chosen, wrong.best, wrong.regret) == ("a", "b", 0.5)
    score = Score((right, wrong))
    assert score.mean_regret == 0.25
    assert (score.worst, score.hits, score.rows) == (wrong, 1, 4)
    assert score.ratios == pytest.approx([0.1, 2 / 11, 1 / 15, 0.2])


def test_pairs_that_measure_alike_are_not_ordered() -> None:
    shape = made({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 1.0, "b": 1.04, "c": 0.5})
    assert shape.ordered_pairs == [False, False]
    assert Score((shape,)).pairs == (0, 2)
