"""Scans, torch's higher-order operators, in parts, against one process in float64."""

import pytest
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.cpu.against_one_process import compare
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
        strategy={"mixers": strategy},
    )
    return comparison, counters["cpcompile"]["exchange_mixers"]


class AfterAttention(nn.Module):
    """A scan after attention, and nothing between that needs the order of tokens."""

    def __init__(self):
        super().__init__()
        self.qkv, self.scan = nn.Linear(32, 96), SCANS["Associative"]()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.scan(x + y.transpose(1, 2).flatten(2))


def run_in_layout(strategy):
    return compare(
        AfterAttention,
        (1, 16, 32),
        2,
        strategy={"attention": "ring", "mixers": strategy},
        layout="zigzag",
    )


@pytest.mark.timeout(100)
@pytest.mark.parametrize("strategy", ["exchange", "states"])
def test_a_scan_beside_attention_in_a_balanced_layout(pools, strategy):
    for comparison in pools[2].run(run_in_layout, strategy, timeout=90):
        comparison.check()


@pytest.mark.slow(
    but=[
        "Recurrence-exchange-2-1",
        "LearntStart-exchange-3-1",
        "Associative-exchange-2-2",
        "Associative-states-3-1",
        "HeadNorm-exchange-2-1",
    ]
)
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
