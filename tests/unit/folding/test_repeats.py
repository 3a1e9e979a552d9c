"""Which stretches of a sequence repeat."""

import random

import pytest

from cpcompile.passes.local.folding.repeats import RepeatedRun, repeats


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("xabcabcabcy", RepeatedRun(1, 9, 3)),
        ("abababab", RepeatedRun(0, 8, 2)),
        ("xabcabcabcaby", RepeatedRun(1, 11, 3)),
        ("aabaabaab", RepeatedRun(0, 9, 3)),
    ],
)
def test_the_one_that_saves_most(text, best):
    assert repeats(text, 3, 2)[0] == best
    assert repeats("xabcabcy", 3, 2) == repeats("aaaaaa", 3, 3) == []  # too few


def test_planted_ones():
    draw = random.Random(0)
    for _ in range(200):
        period, count = draw.randint(2, 9), draw.randint(3, 6)
        block = [draw.randint(0, 99) for _ in range(period)]
        edges = [
            [draw.randint(100, 999) for _ in range(draw.randint(0, 9))] for _ in "ab"
        ]
        found = repeats([*edges[0], *block * count, *edges[1]], 3, 2)[0]
        assert (found.start, found.length) == (len(edges[0]), count * period)
        assert period % found.period == 0
