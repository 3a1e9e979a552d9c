"""Work of a whole model; the published table is in tests/cost/test_published.py."""

from __future__ import annotations

import pytest

from cpcompile.cost.training_flops import ModelSize, balanced_speedup

TINY = ModelSize(hidden=8, feed_forward=16, layers=2, vocabulary=10)
NO_DENSE = ModelSize(hidden=8, feed_forward=0, layers=10**9, vocabulary=0)


def test_dense_products_and_attention() -> None:
    # q, k, v and output projections, two products of the feed-forward, the vocabulary.
    per_layer = 2 * (4 * 8 * 8 + 2 * 8 * 16)
    assert TINY.dense_flops_per_token == 2 * per_layer + 2 * 8 * 10
    gated = ModelSize(8, 16, 2, 10, feed_forward_products=3)
    assert gated.dense_flops_per_token - TINY.dense_flops_per_token == 2 * 2 * 8 * 16
    assert TINY.attention_flops_per_token(100.0) == 4 * 2 * 8 * 100  # a pair and dim


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_attention_alone_gains_two_minus_one_over_n(ranks: int) -> None:
    found = balanced_speedup(NO_DENSE, 2**24, ranks)
    assert found == pytest.approx(2 - 1 / ranks, rel=1e-3)


def test_more_attention_gains_more() -> None:
    model = ModelSize(2048, 5504, 22, 32000)
    short, long = (balanced_speedup(model, n, 8) for n in (8192, 131072))
    assert 1 < short < long < 2 - 1 / 8
    assert balanced_speedup(model, 8192, 8, 2.0) > short
