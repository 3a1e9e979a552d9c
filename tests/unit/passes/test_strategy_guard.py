"""The region of lengths for which a plan is right, found by asking for plans."""

import math
from dataclasses import replace

import pytest

from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Direction, Strategy
from cpcompile.errors import RewriteError
from cpcompile.passes.model.attention import choose_strategy as guards
from tests.unit.cost.cost_cases import NO_COMPUTATION, workload
from tests.unit.cost.test_cost_masks import CALL as OF_LATENTS

CALL = replace(
    workload(heads=8, kv_heads=8, causal=True, direction=Direction.BOTH),
    value_dim=64,
    batch=1,
)


def decide_by(*borders):
    """A ring from borders[0] tokens on, all_gather from borders[1] on, and so on."""
    profile = load_profile("h100_sxm")
    wanted = [Strategy.RING, Strategy.ALL_GATHER]
    questions = []

    def decide(workload):
        questions.append(workload)
        passed = sum(workload.q_len >= border for border in borders)
        best = wanted[(passed + 1) % 2]
        return choose(workload, profile, strategy=best, memory_budget=math.inf)

    return decide, questions


@pytest.mark.parametrize(
    ("borders", "expected"),
    [
        ((), (4, None)),
        ((4096,), (4096, None)),
        ((4097,), (4, 4100)),  # lengths are multiples of the ranks
        ((1000, 9999), (1000, 10000)),
        ((4000, 4100), (4000, 4100)),
        ((8,), (8, None)),
    ],
)
def test_the_border_is_found(borders, expected):
    decide, questions = decide_by(*borders)
    assert guards.region(decide(CALL), decide, True, True) == expected
    assert len(questions) < 150
    assert all(w.q_len == w.kv_len and w.q_len % 4 == 0 for w in questions)
    assert max(w.q_len for w in questions) <= guards.LONGEST_TOKENS


def test_what_stays_and_what_ends_the_region():
    decide, questions = decide_by(1000)
    plan = decide(replace(CALL, kv_len=100))
    assert guards.region(plan, decide, True, False) == (1000, None)
    assert {w.kv_len for w in questions} == {100}
    # As where a forced strategy needs more memory than there is.
    decide, _ = decide_by()

    def within_memory(workload):
        if workload.q_len > 6000:
            raise RewriteError("needs too much memory")
        return decide(workload)

    assert guards.region(decide(CALL), within_memory, True, True) == (4, 6004)


def test_the_cost_model_has_a_border_on_both_sides():
    """What is chosen at the ends of the region, and next to it, is as promised."""
    profile = load_profile("h100_sxm")

    def decide(workload):
        return choose(workload, profile, memory_budget=math.inf)

    plan = decide(CALL)
    low, high = guards.region(plan, decide, True, True)
    forms = {
        tokens: decide(replace(CALL, q_len=tokens, kv_len=tokens)).chosen
        for tokens in (low, *((high - 4, high) if high is not None else ()))
    }
    assert forms.pop(low).label == plan.chosen.label
    if high is not None:
        assert forms[high - 4].label == plan.chosen.label != forms[high].label


@pytest.mark.parametrize("chosen", [Strategy.RING, Strategy.ALL_GATHER])
def test_the_chosen_strategy_stays(chosen):
    """Of its kind, though another is the cheapest at least for one of these."""
    plan = choose(OF_LATENTS, NO_COMPUTATION, strategy=chosen)
    same = guards._only(plan, [x for x in Strategy if x is not Strategy.LATENTS])
    assert same is not None and same.chosen is plan.chosen
    other = guards._only(plan, [Strategy.LATENTS])
    assert other is not None and other.chosen.strategy is Strategy.LATENTS
