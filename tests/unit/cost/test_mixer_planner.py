"""Mixers that are planned by their shapes; goldens compare them with the pass."""

import pytest

from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_planner import plan_mixers
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.cost.plans import Direction

EXCHANGE, STATES, GATHER = (
    MixerStrategy.EXCHANGE,
    MixerStrategy.STATES,
    MixerStrategy.GATHER,
)
SIZES = {
    "kind": MixerKind.GATED_DELTA_RULE,
    "batch": 1,
    "tokens": 32768,
    "key_heads": 32,
    "value_heads": 32,
    "key_dim": 128,
    "value_dim": 128,
    "bytes_per_element": 2,
}


def shape(**changes):
    return MixerShape(**(SIZES | changes))


def planned(ranks=8, direction=Direction.BOTH, hardware="h100_sxm", **changes):
    return plan_mixers(shape(**changes), load_profile(hardware), ranks, direction)


@pytest.mark.parametrize("kind", MixerKind)
def test_forward_and_backward_add_up(kind):
    changes = {"key_heads": 1} if kind is MixerKind.MAMBA else {}
    plans = [
        dict(planned(direction=d, kind=kind, **changes).seconds) for d in Direction
    ]
    by_direction = dict(zip(Direction, plans, strict=True))
    for strategy, seconds in by_direction[Direction.BOTH].items():
        one = by_direction[Direction.FORWARD][strategy]
        assert one + by_direction[Direction.BACKWARD][strategy] == pytest.approx(
            seconds
        )


def test_one_rank_exchanges_nothing():
    plan = planned(ranks=1)
    assert plan.seconds == ((GATHER, 0.0),) and plan.runner_up is None


@pytest.mark.parametrize(
    ("changes", "strategy"),
    [
        ({"ranks": 64, "value_dim": 32}, EXCHANGE),  # few heads, rows and channels
        ({"ranks": 32, "key_heads": 16, "value_dim": 16}, EXCHANGE),  # two head numbers
        ({"tokens": 9}, STATES),  # one rank is left without any
        ({"kind": MixerKind.MAMBA, "key_heads": 1}, STATES),  # takes no state
    ],
)
def test_what_is_not_possible_is_not_priced(changes, strategy):
    assert strategy not in dict(planned(**changes).seconds)


@pytest.mark.parametrize(
    ("changes", "dim"),
    [
        ({}, "heads"),
        ({"value_heads": 4, "key_heads": 4, "batch": 8}, "batch"),
        ({"ranks": 64, "tokens": 64 * 16}, "value channels"),
    ],
)
def test_what_is_exchanged(changes, dim):
    plan = planned(**changes)
    assert (plan.strategy, plan.dim) == (EXCHANGE, dim)


def test_uneven_heads_cost_the_work_of_the_largest_part():
    even, uneven = (
        dict(planned(key_heads=n, value_heads=n, ranks=4).seconds)[EXCHANGE] / n
        for n in (12, 13)
    )
    assert uneven > even


def test_kernels_are_as_fast_as_published():
    """The times of fla that the speeds were fitted to, on H800."""
    for kind, tokens, heads, milliseconds in (
        (MixerKind.GATED_DELTA_RULE, 32768, 64, 4.808),
        (MixerKind.GATED_DELTA_RULE, 8192, 96, 2.033),
        (MixerKind.KDA, 8192, 96, 3.268),
        (MixerKind.KDA, 32768, 16, 2.299),
    ):
        call = shape(kind=kind, tokens=tokens, key_heads=heads, value_heads=heads)
        seconds = call.forward_seconds(load_profile("h800"))
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15)
