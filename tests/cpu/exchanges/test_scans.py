"""Scans, torch's higher-order operators, in parts, against one process in float64."""

import pytest
from torch._dynamo.utils import counters

from tests.cpu.against_one_process import compare
from tests.cpu.exchanges.test_known_mixers import AfterAttention
from tests.support.scans import SCANS

CASES = [
    (name, "exchange", world, batch)
    for name in SCANS
    for world, batch in ((2, 2), (2, 1), (3, 1))
]
CASES += [("Associative", "states", world, batch) for world, batch in ((2, 2), (3, 1))]


def run(name, strategy, world, batch):
    """Compare a module whose scan is shared; count the calls."""
    counters.clear()
    comparison = compare(
        SCANS[name],
        (batch, 14, 32),
        world,
        shard={"x": 1},
        strategy=strategy,
    )
    return comparison, counters["cpcompile"]["exchange_mixers"]


def run_in_layout(strategy):
    return compare(
        lambda: AfterAttention(SCANS["Associative"]()),
        (1, 16, 32),
        2,
        strategy=f"ring, {strategy}",
        layout="zigzag",
    )


@pytest.mark.slow(but=["states"])
@pytest.mark.timeout(100)
@pytest.mark.parametrize("strategy", ["exchange", "states"])
def test_a_scan_beside_attention_in_a_balanced_layout(pools, strategy):
    for comparison in pools[2].run(run_in_layout, strategy, timeout=90):
        comparison.check()


@pytest.mark.slow(but=["Associative-states-3-1"])
@pytest.mark.timeout(100)
@pytest.mark.parametrize(("name", "strategy", "world", "batch"), CASES)
def test_a_scan_equals_one_process(pools, name, strategy, world, batch):
    """Nothing is warned of, but that a step of Elman needs all channels of a row.

    A rank's part of the channels is not four heads, where DTensor would make two.
    """
    for comparison, count in pools[world].run(
        run, name, strategy, world, batch, timeout=90
    ):
        comparison.check()
        if name == "HeadNorm":
            continue  # its scan may stay, and its cumulative sum is exchanged
        stays = name == "Elman" and batch == 1
        assert (count == 0) == stays
        assert len(comparison.warnings) == stays
