"""The table of strategies: all that other code has to know of one but its formulas.

A strategy is an operator, torch.ops.cp.<operator>, with the meaning of attention over
the whole sequence. What else differs, as which groups it works on, is read from the
operator's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cpcompile.cost.model import (
    PassCost,
    all_gather_cost,
    grouped_ulysses_cost,
    hybrid_cost,
    latents_cost,
    ring_cost,
    split_kv_cost,
    ulysses_cost,
)
from cpcompile.cost.plans import Strategy
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout


@dataclass(frozen=True)
class StrategyRow:
    """What tells one strategy from the others.

    operator: its name in torch.ops.cp.
    cost: of one pass on the slowest rank, from (causal, layout, backward).
    grouped: the cost with heads in groups, for an operator that can exchange them so.
    degrees: every factorisation of a number of ranks that it can have.
    layouts: those that the operator takes, of causal attention and without a mask.
    masked_layouts: those that it takes under key ranges and segment ids. A mask that
        is a tensor lies in the order of the sequence: it needs the contiguous one.
    runs_steps: whether the local attention is made of cp::attention_step, which has
        templates of ours; otherwise it is torch's own attention.
    always_gives_lse: whether the operator returns the log-sum-exp of the scores also
        where nothing reads it, at no cost.
    of_latents: whether it is for calls whose keys and values are made of something
        narrower, and for those alone.
    few_queries: whether it is for calls with fewer queries than ranks, and for those
        alone: every rank has all queries, and there is no backward.
    color, marker, line: of its curves, as matplotlib takes them.
    """

    operator: str
    cost: Callable[[bool, Layout, bool], PassCost]
    degrees: Callable[[int], list[CPDegrees]]
    layouts: tuple[Layout, ...]
    masked_layouts: tuple[Layout, ...]
    runs_steps: bool
    color: str
    marker: str
    line: str
    grouped: Callable[[bool, Layout, bool], PassCost] | None = None
    always_gives_lse: bool = True
    of_latents: bool = False
    few_queries: bool = False


def factorisations(ranks: int) -> list[CPDegrees]:
    """List every hybrid of `ranks` ranks, in both orders."""
    return [
        CPDegrees(ulysses, ranks // ulysses, inner)
        for ulysses in range(2, ranks)
        if ranks % ulysses == 0
        for inner in ("ulysses", "ring")
    ]


def _one_ring(ranks: int) -> list[CPDegrees]:
    return [CPDegrees(1, ranks)]


def _one_exchange(ranks: int) -> list[CPDegrees]:
    return [CPDegrees(ranks, 1)]


_CONTIGUOUS = (Layout.CONTIGUOUS,)
_TWO_RUNS = (Layout.CONTIGUOUS, Layout.ZIGZAG)

STRATEGIES: dict[Strategy, StrategyRow] = {
    Strategy.RING: StrategyRow(
        operator="ring_attention",
        cost=ring_cost,
        degrees=_one_ring,
        layouts=tuple(Layout),
        masked_layouts=_TWO_RUNS,
        runs_steps=True,
        color="#0072B2",
        marker="o",
        line="-",
    ),
    Strategy.ALL_GATHER: StrategyRow(
        operator="all_gather_attention",
        cost=all_gather_cost,
        degrees=_one_ring,
        layouts=_TWO_RUNS,
        masked_layouts=_TWO_RUNS,
        runs_steps=True,
        color="#D55E00",
        marker="s",
        line="--",
    ),
    Strategy.ULYSSES: StrategyRow(
        operator="ulysses_attention",
        cost=ulysses_cost,
        degrees=_one_exchange,
        layouts=_CONTIGUOUS,
        masked_layouts=_CONTIGUOUS,
        runs_steps=False,
        color="#009E73",
        marker="^",
        line="-.",
        grouped=grouped_ulysses_cost,
        always_gives_lse=False,
    ),
    Strategy.HYBRID: StrategyRow(
        operator="hybrid_attention",
        cost=hybrid_cost,
        degrees=factorisations,
        layouts=_TWO_RUNS,
        masked_layouts=_TWO_RUNS,
        runs_steps=True,
        color="#CC79A7",
        marker="D",
        line=":",
        always_gives_lse=False,
    ),
    Strategy.LATENTS: StrategyRow(
        operator="all_gather_attention",
        cost=latents_cost,
        degrees=_one_ring,
        layouts=_TWO_RUNS,
        masked_layouts=_TWO_RUNS,
        runs_steps=True,
        color="#E69F00",
        marker="X",
        line="--",
        of_latents=True,
    ),
    Strategy.SPLIT_KV: StrategyRow(
        operator="split_kv_attention",
        cost=split_kv_cost,
        degrees=_one_ring,
        layouts=_CONTIGUOUS,
        masked_layouts=_CONTIGUOUS,
        runs_steps=True,
        color="#56B4E9",
        marker="v",
        line="-",
        few_queries=True,
    ),
}
