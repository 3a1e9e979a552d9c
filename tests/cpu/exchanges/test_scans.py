"""Scans, torch's higher-order operators, in parts, against one process in float64."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.cpu.against_one_process import compare
from tests.support.scans import SCANS

CASES = [
    (name, world, batch) for name in SCANS for world, batch in ((2, 2), (2, 1), (3, 1))
]


def compiled(name):
    """A module that is compiled: torch runs the operator of a scan only so."""
    module = SCANS[name]()
    if name == "Associative":
        module.mix = torch.compile(module.mix, backend="aot_eager")
    return module


def run(name, world, batch):
    """Compare a module whose scan is exchanged; count the calls."""
    counters.clear()
    comparison = compare(
        lambda: compiled(name),
        (batch, 14, 32),
        world,
        shard={"x": 1},
        strategy={"mixers": "exchange"},
    )
    return comparison, counters["cpcompile"]["exchange_mixers"]


@pytest.mark.slow(
    but=["Recurrence-2-1", "LearntStart-3-1", "Associative-2-2", "HeadNorm-2-1"]
)
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("name", "world", "batch"), CASES)
def test_a_scan_equals_one_process(pools, name, world, batch):
    """Nothing is warned of, but that a step of Elman needs all channels of a row.

    A rank's part of the channels is not four heads, where DTensor would make two.
    """
    for comparison, count in pools[world].run(run, name, world, batch, timeout=90):
        comparison.check()
        if name == "HeadNorm":
            continue  # its scan may stay, and its cumulative sum is exchanged
        stays = name == "Elman" and batch == 1
        assert (count == 0) == stays
        assert len(comparison.warnings) == stays
