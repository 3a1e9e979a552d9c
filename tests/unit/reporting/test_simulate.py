"""Timelines end when the cost model says, and their parts are what it adds up."""

from dataclasses import replace
from enum import Enum
from itertools import pairwise

import pytest

import cpcompile as cp
from cpcompile.cost.choose import predict
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import Candidate, Strategy
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.drawing.simulate import timeline
from cpcompile.reporting.drawing.simulated_clocks import Activity

H100 = replace(load_profile("h100"), ranks_per_node=8.0)
# Links that cannot be hidden, and that slow a computation down.
SLOW = H100.with_overrides({"link_bytes_per_second": 2e9, "overlap_fraction": 0.7})
PROFILES = {"fast links": H100, "slow links": SLOW}


def a_plan(profile, **changes):
    overrides = {
        name: getattr(profile, name)
        for name in ("link_bytes_per_second", "overlap_fraction")
    }
    sizes = {"batch": 1, "heads": 16, "kv_heads": 4, "head_dim": 128, "seq": 65536}
    return cp.plan(overrides=overrides, **(sizes | {"ranks": 8} | changes))


def seconds(row, activity):
    return sum(span.seconds for span in row.spans if span.activity is activity)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": False},
        {"ranks": 1},
        {"ranks": 2},
        {"ranks": 16},
        {"seq": 1000, "ranks": 6},
        {"relayout": True},
        {"layout": "fold", "relayout": True},
        {"kv_seq": 1024, "layout": "contiguous"},
        {"seq": 512, "kv_seq": 8192, "layout": "contiguous"},
    ],
    ids=str,
)
def test_the_last_rank_ends_at_the_predicted_time(profile, direction, changes):
    plan = a_plan(profile, direction=direction, **changes)
    possible = [c for c in plan.candidates if c.seconds is not None]
    assert {c.strategy for c in possible} >= {Strategy.RING, Strategy.ALL_GATHER}
    for candidate in possible:
        shown = timeline(candidate, plan.workload, profile)
        assert shown.seconds == pytest.approx(candidate.seconds, rel=1e-9)
        assert shown.candidate is candidate
        for row in shown.rows:
            time = 0.0
            for span in row.spans:  # without gaps, to the end
                assert span.start == pytest.approx(time, rel=1e-9, abs=1e-15)
                assert span.seconds > 0
                time = span.start + span.seconds
            assert time == pytest.approx(shown.seconds, rel=1e-9)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
@pytest.mark.parametrize("direction", ["forward", "both"])
def test_heads_in_groups(profile, direction):
    """The first group comes, and the last goes, while nothing is computed."""
    call = {"heads": 64, "kv_heads": 64, "direction": direction}
    whole = {c.strategy: c for c in a_plan(profile, **call).candidates}
    budget = whole[Strategy.ULYSSES].peak_extra_bytes - 1
    plan = a_plan(profile, memory_budget=budget, **call)
    (candidate,) = (c for c in plan.candidates if c.strategy is Strategy.ULYSSES)
    assert candidate.head_groups > 1 and candidate.excluded is None
    shown = timeline(candidate, plan.workload, profile)
    assert shown.seconds == pytest.approx(candidate.seconds, rel=1e-9)
    for row in shown.rows:
        waited = seconds(row, Activity.COMMUNICATION)
        assert waited == pytest.approx(candidate.exposed_seconds, rel=1e-9)
        names = [x.what for x in row.spans if "attention" in x.what]
        assert len(names) % candidate.head_groups == 0
        sent = sum(message.seconds for message in row.messages)
        assert sent >= waited


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_a_token_is_one_collective(profile):
    plan = a_plan(profile, direction="forward", causal=False, seq=1, kv_seq=8192)
    assert plan.strategy is Strategy.SPLIT_KV
    shown = timeline(plan.chosen, plan.workload, profile)
    assert shown.seconds == pytest.approx(plan.chosen.seconds, rel=1e-9)
    for row in shown.rows:
        spans = ["attention", "all-gather", "merges the results"]
        assert [span.what.removeprefix("forward: ") for span in row.spans] == spans
        waited = seconds(row, Activity.COMMUNICATION)
        assert waited == pytest.approx(plan.chosen.exposed_seconds, rel=1e-9)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
@pytest.mark.parametrize("causal", [True, False])
def test_ranks_with_equal_work_wait_as_long_as_is_predicted(profile, causal):
    plan = a_plan(profile, causal=causal)
    for candidate in plan.candidates:
        if causal and candidate.layout is Layout.CONTIGUOUS:
            continue
        shown = timeline(candidate, plan.workload, profile)
        for row in shown.rows:
            waited = seconds(row, Activity.COMMUNICATION)
            assert waited == pytest.approx(candidate.exposed_seconds, rel=1e-9)
            assert seconds(row, Activity.IDLE) == 0
            if profile.overlap_fraction == 1:
                sent = sum(message.seconds for message in row.messages)
                expected = candidate.exposed_seconds + candidate.hidden_seconds
                assert sent == pytest.approx(expected, rel=1e-9)


def test_contiguous_ranks_compute_the_blocks_that_they_see():
    """Rank r has r dense blocks and its own triangle; the others idle for the last."""
    plan = a_plan(H100, layout="contiguous", direction="forward")
    ring = next(c for c in plan.candidates if c.strategy is Strategy.RING)
    rows = timeline(ring, plan.workload, H100).rows
    computed = [seconds(row, Activity.COMPUTE) for row in rows]
    blocks = [after - before for before, after in pairwise(computed)]
    assert blocks == pytest.approx([blocks[0]] * 7, rel=1e-9)
    steps = [
        [
            s.what
            for s in row.spans
            if s.activity is Activity.COMPUTE and "step" in s.what
        ]
        for row in rows
    ]
    assert [len(each) for each in steps] == list(range(1, 9))
    idle = [seconds(row, Activity.IDLE) for row in rows]
    assert idle == sorted(idle, reverse=True)
    assert idle[-1] == 0 and idle[0] > 0.5 * ring.seconds


def test_a_ring_inside_of_ulysses_is_nearly_balanced():
    plan = a_plan(H100, layout="contiguous", direction="forward")
    degrees = CPDegrees(4, 2, "ring")
    found = next(c for c in plan.candidates if c.degrees == degrees)
    shown = timeline(found, plan.workload, H100)
    assert (shown.positions, shown.ranks_per_row) == (2, 4)
    first, last = (seconds(row, Activity.COMPUTE) for row in shown.rows)
    # Of 16 pairs of runs in the second step rank 0 sees 6 where rank 1 sees 10.
    assert 0.7 < first / last < 0.85


def test_many_ranks_are_shown_from_the_first_to_the_last():
    plan = a_plan(H100, ranks=256, layout="contiguous", direction="forward")
    form = Candidate(Strategy.RING, CPDegrees(1, 256))
    ring = predict(form, plan.workload, H100, float("inf"))
    shown = timeline(ring, plan.workload, H100, rows=5)
    assert shown.positions == 256
    assert [row.rank for row in shown.rows] == [0, 64, 128, 191, 255]
    assert shown.seconds == pytest.approx(ring.seconds, rel=1e-9)


def test_a_strategy_without_clocks_is_not_drawn_as_another():
    new = Enum("new", {"BROADCAST": "broadcast"}).BROADCAST
    plan = a_plan(H100)
    with pytest.raises(ValueError, match="got the strategy 'broadcast'; needed one of"):
        timeline(replace(plan.chosen, strategy=new), plan.workload, H100)


def test_every_strategy_is_drawn():
    many = a_plan(H100, latent_dim=96)
    few = a_plan(H100, direction="forward", seq=1, kv_seq=8192)
    drawn = {
        timeline(each, plan.workload, H100).candidate.strategy
        for plan in (many, few)
        for each in plan.candidates
        if each.seconds is not None
    }
    assert drawn == set(Strategy)
