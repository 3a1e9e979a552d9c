"""Work of a whole model per token, and what a balanced layout can gain at most.

The share of attention in a model bounds what any strategy for it can change. Counting
convention of the theoretical speedups in Brandon et al., Striped Attention (arXiv
2311.09431): per token, matrix products of the layers and of the output projection, with
two products in the feed-forward, and attention over the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.compute import balanced_pairs, last_rank_pairs
from cpcompile.cost.symbols import Sk, Sq, r


@dataclass(frozen=True)
class ModelSize:
    """A transformer: sizes of the hidden state and feed-forward, layers, vocabulary."""

    hidden: int
    feed_forward: int
    layers: int
    vocabulary: int
    feed_forward_products: int = 2

    @property
    def dense_flops_per_token(self) -> int:
        """FLOPs of all matrix products but attention, forward."""
        projections = 4 * self.hidden * self.hidden
        products = self.feed_forward_products * self.hidden * self.feed_forward
        output = 2 * self.hidden * self.vocabulary
        return self.layers * 2 * (projections + products) + output

    def attention_flops_per_token(self, pairs_per_token: float) -> float:
        """Return the FLOPs of attention, forward: 4 per pair and dim."""
        return 4 * self.layers * self.hidden * pairs_per_token


def balanced_speedup(
    model: ModelSize, length: int, ranks: int, attention_slowdown: float = 1.0
) -> float:
    """Return the time of contiguous chunks over that of a balanced layout.

    This is for causal attention in a whole forward, if only FLOPs count and nothing
    else differs.

    Args:
        length: tokens of the sequence, a multiple of `ranks`.
        attention_slowdown: of attention's FLOPs against those of the matrix products.
    """
    last, balanced = (pairs / (length / ranks) for pairs in _pairs()(length, ranks))
    dense = model.dense_flops_per_token
    slowest, even = (
        dense + attention_slowdown * model.attention_flops_per_token(pairs)
        for pairs in (last, balanced)
    )
    return float(slowest / even)


@cache
def _pairs():  # type: ignore[no-untyped-def]  # of what sympy generates
    pairs = (sum(last_rank_pairs(True)), balanced_pairs())
    return sympy.lambdify((Sq, r), [x.subs(Sk, Sq) for x in pairs], "math")
