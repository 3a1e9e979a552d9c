"""Attention within windows and along axes of an image, in float64."""

import pytest

from tests.cpu.against_one_process import compare
from tests.support.grids import MODULES, WIDTH

CASES = [
    (name, world, batch, door)
    for name in MODULES
    for world, batch in ((2, 1), (2, 2), (3, 1))
    for door in ("plain", "dtensor")
    if (name, door) != ("one step", "dtensor")  # DTensor has no rule for that view
]


def compared(name, world, batch, door):
    make, tokens = MODULES[name]
    options = {} if door == "dtensor" else {"shard": {"x": 1}}
    return compare(make, (batch, tokens, WIDTH), world, door, **options)


@pytest.mark.slow(but=["shifted-2-2-plain", "uneven axes-2-2-plain"])
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "world", "batch", "door"), CASES)
def test_it_equals_one_process(pools, name, world, batch, door):
    for comparison in pools[world].run(compared, name, world, batch, door, timeout=100):
        comparison.check()
