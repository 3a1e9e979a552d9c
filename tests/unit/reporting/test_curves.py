"""Curves are the cost model's, and crossovers are where the choice changes."""

from dataclasses import replace

import pytest

import cpcompile as cp
from cpcompile.cost.crossover import with_length
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import SEQUENCE_STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.reporting.drawing.curves import (
    Crossing,
    Setting,
    crossings_text,
    over_length,
    over_ranks,
)
from cpcompile.reporting.plan_facts import plan_layouts

PROFILE = replace(load_profile("h100"), ranks_per_node=8.0)


@pytest.fixture(scope="module")
def setting():
    plan = cp.plan(batch=1, heads=32, kv_heads=8, head_dim=128, seq=65536, ranks=8)
    return Setting(plan.workload, PROFILE, plan_layouts(plan))


def best(plan, strategy):
    return min(
        1e3 * c.seconds
        for c in plan.candidates
        if c.strategy is strategy and c.excluded is None
    )


def test_points_are_the_best_form_of_each_strategy(setting):
    curves = over_length(setting)
    assert 65536 in curves.sizes
    for index, size in enumerate(curves.sizes):
        plan = setting.plan(with_length(setting.workload, size))
        for strategy in SEQUENCE_STRATEGIES:
            time = curves.milliseconds[strategy][index]
            assert time == best(plan, strategy)


def test_crossovers_over_the_length_are_exact(setting):
    curves = over_length(setting)
    assert curves.crossings
    for crossing in curves.crossings:
        labels = [
            setting.plan(with_length(setting.workload, size)).chosen.label
            for size in (crossing.size - 1, crossing.size)
        ]
        assert labels == [crossing.before, crossing.after]


def test_crossovers_over_ranks_are_where_the_next_size_differs(setting):
    curves = over_ranks(setting)
    labels = [
        setting.plan(replace(setting.workload, ranks=n)).chosen.label
        for n in curves.sizes
    ]
    assert curves.sizes == tuple(2**i for i in range(7))
    expected = [
        Crossing(n, before, after)
        for n, before, after in zip(
            curves.sizes[1:], labels[:-1], labels[1:], strict=True
        )
        if before != after
    ]
    assert list(curves.crossings) == expected


def test_the_ranks_of_the_plan_are_a_point(setting):
    odd = replace(setting, workload=replace(setting.workload, ranks=24))
    assert over_ranks(odd).sizes == (1, 2, 4, 8, 16, 24, 32, 64)


def test_what_is_excluded_leaves_a_gap(setting):
    least = replace(setting, memory_budget=2**20)
    curves = over_length(least)
    assert all(times[-1] is None for times in curves.milliseconds.values())
    with pytest.raises(RewriteError):
        least.plan(with_length(setting.workload, curves.sizes[-1]))


def test_words():
    crossings = [Crossing(100, "ulysses", "ring"), Crossing(2000, "ring", "all_gather")]
    assert crossings_text(crossings, "tokens") == (
        "from 100 tokens on ring instead of ulysses, "
        "from 2000 tokens on all_gather instead of ring"
    )
