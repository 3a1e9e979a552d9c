"""Mixers in parts along another dimension, against one process, in float64."""

from collections import Counter

import pytest
import torch
from torch._dynamo.utils import counters

import cpcompile as cp
from cpcompile.accounting.graph_account import GraphDirection, Purpose
from cpcompile.reporting import lost_parallelism
from tests.cpu.against_one_process import compare
from tests.cpu.attention_cases import sequence_mesh
from tests.support.mixers import MIXERS

# Rows of a batch, heads and channels that two ranks divide; and channels that three
# do not.
CASES = [
    (name, world, batch, tokens)
    for name in MIXERS
    for world, batch, tokens in ((2, 2, 16), (2, 1, 16), (3, 1, 20))
]


# Gathers of small tensors would be cheaper.
FORCED = "exchange"


def run(name, world, batch, tokens, **options):
    """Compare a mixer that is exchanged whatever that costs; count its calls."""
    counters.clear()
    options = {"shard": {"x": 1}, "strategy": FORCED, **options}
    comparison = compare(MIXERS[name], (batch, tokens, 32), world, **options)
    return comparison, counters["cpcompile"]["exchange_mixers"]


def explained(tokens):
    """What a linear attention by heads exchanges, by purpose."""
    mesh = sequence_mesh(2)
    options = {
        "mesh": mesh,
        "shard": {"x": 1},
        "inner": "aot_eager",
        "strategy": FORCED,
    }
    compiled = torch.compile(MIXERS["LinearAttention"](), backend="cp", options=options)
    explanation = cp.explain(compiled, torch.randn(1, tokens, 32).requires_grad_())
    (graph,) = explanation.graphs
    exchanges = [x for account in graph.accounts for x in account.exchanges]
    sums = Counter()
    for exchange in exchanges:
        sums[exchange.direction, exchange.purpose] += exchange.bytes
    return sums


def test_what_is_exchanged_is_listed(pools):
    """q, k and v leave the side of the tokens and one result comes back."""
    (listed, _) = pools[2].run(explained, 16)
    value = (
        16 * 32 * 4 // 4
    )  # of four parts of a float32 value one comes from the other
    for direction in GraphDirection:
        assert listed[direction, Purpose.MIXER] == 4 * value
    assert not any(purpose is Purpose.VALUE for _, purpose in listed)


@pytest.mark.slow(but=["Lightning-2-1-16", "ConvolvedGRU-3-1-20"])
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "world", "batch", "tokens"), CASES)
def test_a_mixer_equals_one_process(pools, name, world, batch, tokens):
    arguments = (name, world, batch, tokens)
    for comparison, count in pools[world].run(run, *arguments, timeout=120):
        comparison.check()
        # Four heads leave one of three ranks without any; others have channels, of
        # which two that belong together may not come apart.
        stays = name in ("WrittenChunks", "LongKernel") and world == 3
        assert (count == 0) == stays
        if not stays:
            assert comparison.warnings == []


def warned():
    """What is said of a module whose tokens nothing tells.

    In a process that has compiled attention it may be a part of such a model.
    """
    lost_parallelism._attended.clear()
    return compare(MIXERS["LinearAttention"], (1, 16, 32), 2).warnings


def test_it_is_said_that_nothing_is_sharded(pools):
    """A hidden state may have its tokens anywhere."""
    for texts in pools[2].run(warned):
        (text,) = texts
        assert text.startswith("forward: nothing is sharded")
        assert 'options={"shard": {"argument": dim}}' in text
