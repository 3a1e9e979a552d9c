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

_CONTIGUOUS = (Layout.CONTIGUOUS,)
_TWO_RUNS = (Layout.CONTIGUOUS, Layout.ZIGZAG)


@dataclass(frozen=True)
class StrategyRow:
    """What tells one strategy from the others.

    operator: its name in torch.ops.cp.
    cost: of one pass on the slowest rank, from (causal, layout, backward).
    grouped: the cost with heads in groups, for an operator that can exchange them so.
    degrees: every factorisation of a number of ranks that it can have; a ring of all
        ranks by itself.
    layouts: those that the operator takes, of causal attention and without a mask.
    runs_steps: whether the local attention is made of cp::attention_step, which has
        templates of ours; otherwise it is torch's own attention.
    always_gives_lse: whether the operator returns the log-sum-exp of the scores also
        where nothing reads it, at no cost.
    of_latents: whether it is for calls whose keys and values are made of something
        narrower, and for those alone.
    few_queries: whether it is for calls with fewer queries than ranks, and for those
        alone: every rank has all queries, and there is no backward.
    look: color, marker and line of its curves, as matplotlib takes them.
    """

    operator: str
    cost: Callable[[bool, Layout, bool], PassCost]
    look: tuple[str, str, str]
    degrees: Callable[[int], list[CPDegrees]] = lambda ranks: [CPDegrees(1, ranks)]
    layouts: tuple[Layout, ...] = _TWO_RUNS
    runs_steps: bool = True
    grouped: Callable[[bool, Layout, bool], PassCost] | None = None
    always_gives_lse: bool = True
    of_latents: bool = False
    few_queries: bool = False

    @property
    def masked_layouts(self) -> tuple[Layout, ...]:
        """The layouts that it takes under key ranges and segment ids.

        A mask that is a tensor lies in the order of the sequence: it needs the
        contiguous one.
        """
        return tuple(layout for layout in self.layouts if layout in _TWO_RUNS)


def factorisations(ranks: int) -> list[CPDegrees]:
    """List every hybrid of `ranks` ranks, in both orders."""
    return [
        CPDegrees(ulysses, ranks // ulysses, inner)
        for ulysses in range(2, ranks)
        if ranks % ulysses == 0
        for inner in ("ulysses", "ring")
    ]


STRATEGIES: dict[Strategy, StrategyRow] = {
    Strategy.RING: StrategyRow(
        operator="ring_attention",
        cost=ring_cost,
        look=("#0072B2", "o", "-"),
        layouts=tuple(Layout),
    ),
    Strategy.ALL_GATHER: StrategyRow(
        operator="all_gather_attention",
        cost=all_gather_cost,
        look=("#D55E00", "s", "--"),
    ),
    Strategy.ULYSSES: StrategyRow(
        operator="ulysses_attention",
        cost=ulysses_cost,
        look=("#009E73", "^", "-."),
        degrees=lambda ranks: [CPDegrees(ranks, 1)],
        layouts=_CONTIGUOUS,
        runs_steps=False,
        grouped=grouped_ulysses_cost,
        always_gives_lse=False,
    ),
    Strategy.HYBRID: StrategyRow(
        operator="hybrid_attention",
        cost=hybrid_cost,
        look=("#CC79A7", "D", ":"),
        degrees=factorisations,
        always_gives_lse=False,
    ),
    Strategy.LATENTS: StrategyRow(
        operator="all_gather_attention",
        cost=latents_cost,
        look=("#E69F00", "X", "--"),
        of_latents=True,
    ),
    Strategy.SPLIT_KV: StrategyRow(
        operator="split_kv_attention",
        cost=split_kv_cost,
        look=("#56B4E9", "v", "-"),
        layouts=_CONTIGUOUS,
        few_queries=True,
    ),
}
