"""Mixers in parts along another dimension, against one process, in float64."""

from unittest import mock

import pytest
from torch._dynamo.utils import counters

from cpcompile.passes.model.mixers import exchange_mixers
from tests.cpu.against_one_process import compare
from tests.support.mixers import MIXERS

# Rows of a batch, heads and channels that two ranks divide; and channels that three
# do not.
CASES = [
    (name, world, batch, tokens)
    for name in MIXERS
    for world, batch, tokens in ((2, 2, 16), (2, 1, 16), (3, 1, 20))
]


def run(name, world, batch, tokens, **options):
    """Compare a mixer that is exchanged whatever that costs; count its calls."""
    counters.clear()
    # A price that no exchange has: small tensors are gathered otherwise.
    dear = mock.patch.object(exchange_mixers._Exchange, "_gather_price", lambda *_: 1.0)
    with dear:
        comparison = compare(
            MIXERS[name], (batch, tokens, 32), world, shard={"x": 1}, **options
        )
    return comparison, counters["cpcompile"]["exchange_mixers"]


@pytest.mark.slow(
    but=[
        "LinearAttention-2-2-16",
        "Retention-2-1-16",
        "WrittenChunks-2-1-16",
        "LongConvolution-3-1-20",
        "MinGRU-3-1-20",
    ]
)
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "world", "batch", "tokens"), CASES)
def test_a_mixer_equals_one_process(pools, name, world, batch, tokens):
    arguments = (name, world, batch, tokens)
    for comparison, count in pools[world].run(run, *arguments, timeout=120):
        comparison.check()
        # Two rows of a batch are all that a norm leaves independent, and heads that
        # three ranks do not divide are views of their channels.
        stays = (name == "NormOverHeads" and batch == 1) or (
            name == "WrittenChunks" and world == 3
        )
        assert (count == 0) == stays
        if not stays:
            assert comparison.warnings == []
