"""Calls that change the number of tokens equal one process, in float64."""

from __future__ import annotations

import pytest

from tests.cpu.against_one_process import compare
from tests.support.forms.strided_forms import FORMS, TWINS, WIDTH, Image, Model

CASES = [
    (name, world, tokens)
    for name in FORMS | TWINS
    for world, tokens in ((2, 24), (3, 30), (4, 42))
    if (name, world) != ("equal parts", 4)  # of 6 tokens a rank would have none
]


def compared(name, world, tokens, door, options):
    return compare(lambda: Model(name), (2, tokens, WIDTH), world, door, **options)


@pytest.mark.parametrize(("name", "world", "tokens"), CASES)
def test_it_equals_one_process(pools, name, world, tokens):
    options = {"shard": {"x": 1}}
    for found in pools[world].run(compared, name, world, tokens, "plain", options):
        found.check()
        gathered = any("gathered" in text for text in found.warnings)
        assert name in TWINS or not gathered  # twins may be exchanged for channels


def of_an_image(rows, world):
    return compare(Image, (2, 3, rows, 24), world, shard={"x": 2})


@pytest.mark.parametrize(("rows", "world"), [(64, 2), (88, 3)])
def test_rows_of_an_image(pools, rows, world):
    for found in pools[world].run(of_an_image, rows, world):
        found.check()
        assert not any("times the work" in text for text in found.warnings)


@pytest.mark.parametrize("name", ["halves", "doubles", "overlapping", "grid"])
def test_dtensors(pools, name):
    for found in pools[3].run(compared, name, 3, 30, "dtensor", {}):
        found.check()


@pytest.mark.parametrize("layout", ["zigzag", "striped", "fold"])
def test_layouts(pools, layout):
    """Windows have the tokens in order."""
    options = {"shard": {"x": 1}, "strategy": "ring", "layout": layout}
    for found in pools[3].run(compared, "halves", 3, 30, "plain", options):
        found.check()


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", ["halves", "doubles", "maxima"])
def test_with_inductor(pools, name):
    options = {"shard": {"x": 1}, "inner": "inductor"}
    for found in pools[2].run(compared, name, 2, 21, "plain", options, timeout=160):
        found.check()
