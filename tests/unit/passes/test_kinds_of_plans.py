"""A plan of one kind, with keys made of latents or not, keeps what was chosen."""

import pytest

from cpcompile.cost.choose import choose
from cpcompile.cost.plans import Strategy
from cpcompile.passes.model.attention.choose_strategy import _only
from tests.unit.cost.cost_cases import NO_COMPUTATION
from tests.unit.cost.test_latents import CALL


@pytest.mark.parametrize("chosen", [Strategy.RING, Strategy.ALL_GATHER])
def test_the_chosen_strategy_stays(chosen):
    """The cheapest of its kind is another one, at least for one of these."""
    plan = choose(CALL, NO_COMPUTATION, strategy=chosen)
    kept = _only(plan, of_latents=False)
    assert kept is not None and kept.chosen is plan.chosen
    other = _only(plan, of_latents=True)
    assert other is not None and other.chosen.strategy is Strategy.LATENTS
