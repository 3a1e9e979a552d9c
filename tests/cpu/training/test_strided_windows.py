"""Calls that change the number of tokens equal one process, in float64."""

from __future__ import annotations

import pytest

from tests.cpu.against_one_process import compare
from tests.cpu.on_ranks import on_ranks
from tests.support.forms.strided_forms import FORMS, TWINS, WIDTH, Model

CASES = [
    (name, world, tokens)
    for name in FORMS | TWINS
    for world, tokens in ((2, 24), (3, 30), (4, 42))
    if (name, world) != ("equal parts", 4)  # of 6 tokens a rank would have none
]


# Dtensors, layouts (windows have the tokens in order), and Inductor.
LAYOUTS = ("zigzag", "striped", "fold")
HOW = [
    *((name, world, n, "plain", {}) for name, world, n in CASES),
    *(
        (name, 3, 30, "dtensor", {})
        for name in ("halves", "doubles", "overlapping", "grid")
    ),
    *(("halves", 3, 30, "plain", {"layout": x, "strategy": "ring"}) for x in LAYOUTS),
    *(
        (x, 2, 21, "plain", {"inner": "inductor"})
        for x in ("halves", "doubles", "maxima")
    ),
]


@pytest.mark.parametrize(("name", "world", "tokens", "door", "options"), HOW)
@on_ranks("world")
def test_it_equals_one_process(name, world, tokens, door, options):
    named = {"shard": {"x": 1}} if door == "plain" else {}
    shape = (2, tokens, WIDTH)
    found = compare(lambda: Model(name), shape, world, door, **named, **options)
    found.check()
    gathered = any("gathered" in text for text in found.warnings)
    # Twins may be exchanged for channels.
    assert options or door == "dtensor" or name in TWINS or not gathered
