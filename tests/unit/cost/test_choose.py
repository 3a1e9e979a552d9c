"""Which candidate is chosen, in which order they are listed, and why some are out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.cost.choose import PLENTY, choose, predict, rank
from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile, load_profile
from cpcompile.cost.plans import (
    SEQUENCE_STRATEGIES,
    Candidate,
    Direction,
    Plan,
    Strategy,
)
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.errors import RewriteError
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, LLAMA, NO_COMPUTATION, at

RING, ALL_GATHER, ULYSSES, HYBRID = SEQUENCE_STRATEGIES
TRAINING = replace(LLAMA, direction=Direction.BOTH)
ALL_LAYOUTS = (Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED)


def lines(plan: Plan, most: int = 99) -> str:
    """The plan as text: the decision, then a line per candidate."""
    how = "forced" if plan.forced else "chosen"
    rows = [f"{plan.chosen.label} {how}, {plan.hardware}"]
    for c in plan.candidates[:most]:
        if c.excluded is not None:
            rows.append(f"{c.label}: {c.excluded}")
            continue
        assert c.seconds is not None and c.peak_extra_bytes is not None
        assert c.exposed_seconds is not None and c.hidden_seconds is not None
        rows.append(
            f"{c.label}: {c.seconds * 1e3:.2f} ms, {c.exposed_seconds * 1e3:.2f} "
            f"exposed, {c.hidden_seconds * 1e3:.2f} hidden, "
            f"{c.peak_extra_bytes / 2**20:.0f} MiB, {c.kernels} kernels"
        )
    return "\n".join(rows)


def candidate(strategy: Strategy, seconds: float, **changes: Any) -> Candidate:
    costs: dict[str, Any] = {"peak_extra_bytes": 0, "kernels": 1}
    return Candidate(strategy, CPDegrees(1, 8), seconds=seconds, **{**costs, **changes})


def out(strategy: Strategy) -> Candidate:
    return Candidate(strategy, CPDegrees(1, 8), excluded="for a reason")


def test_every_candidate_is_listed_with_its_cost() -> None:
    assert_expected_inline(
        lines(choose(LLAMA, H100)),
        """\
ulysses chosen, h100_sxm
ulysses: 0.39 ms, 0.12 exposed, 0.00 hidden, 36 MiB, 1 kernels
hybrid 2 (ring) in 4: 0.44 ms, 0.10 exposed, 0.02 hidden, 60 MiB, 8 kernels
hybrid 4 in 2 (ring): 0.49 ms, 0.10 exposed, 0.02 hidden, 60 MiB, 2 kernels
all_gather: 0.52 ms, 0.12 exposed, 0.00 hidden, 64 MiB, 1 kernels
hybrid 4 (ring) in 2: 0.56 ms, 0.09 exposed, 0.06 hidden, 60 MiB, 8 kernels
hybrid 2 in 4 (ring): 0.59 ms, 0.09 exposed, 0.06 hidden, 60 MiB, 4 kernels
ring: 0.85 ms, 0.04 exposed, 0.14 hidden, 40 MiB, 8 kernels""",
    )


def test_balanced_layouts_are_compared_if_they_can_be_made() -> None:
    assert_expected_inline(
        lines(choose(TRAINING, H100, layouts=ALL_LAYOUTS), 5),
        """\
ulysses chosen, h100_sxm
ulysses: 1.14 ms, 0.24 exposed, 0.00 hidden, 56 MiB, 1 kernels
hybrid 4 in 2 (ring) zigzag: 1.24 ms, 0.25 exposed, 0.07 hidden, 80 MiB, 2 kernels
hybrid 2 (ring) in 4 zigzag: 1.24 ms, 0.25 exposed, 0.07 hidden, 80 MiB, 2 kernels
hybrid 4 in 2 (ring) striped: 1.26 ms, 0.25 exposed, 0.07 hidden, 80 MiB, 2 kernels
hybrid 2 (ring) in 4 striped: 1.26 ms, 0.25 exposed, 0.07 hidden, 80 MiB, 2 kernels""",
    )


def test_training_is_forward_and_backward() -> None:
    passes = {
        each: {
            c.label: c for c in choose(replace(LLAMA, direction=each), H100).candidates
        }
        for each in Direction
    }
    for label, both in passes[Direction.BOTH].items():
        forward, backward = (
            passes[each][label] for each in (Direction.FORWARD, Direction.BACKWARD)
        )
        for name in ("seconds", "exposed_seconds", "hidden_seconds", "wire_bytes"):
            parts = getattr(forward, name) + getattr(backward, name)
            assert getattr(both, name) == pytest.approx(parts)
        peaks = (forward.peak_extra_bytes, backward.peak_extra_bytes)
        assert both.peak_extra_bytes == max(x or 0 for x in peaks)
        assert both.kernels == forward.kernels  # those of the forward


# Short, so that cores are idle, and long; on two nodes.
LONG = replace(
    TRAINING, relayout=True, ranks=16, head_dim=64, q_len=2**17, kv_len=2**17
)
SHORT = replace(LONG, q_len=2048, kv_len=2048)


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_of_the_profile_counts(field: str) -> None:
    if field == "memory_bytes":
        with pytest.raises(RewriteError, match=r"budget is 0\.0 MiB"):
            choose(SHORT, replace(H100, memory_bytes=1.0))
        return
    machine = replace(H100, ranks_per_bridge=4.0, bridge_bytes_per_second=1e10)
    changed = machine.with_overrides({field: getattr(machine, field) / 2 + 1e-5})
    bits = int(field.split("_")[2]) if field.startswith("speed_of") else 16
    workloads = [replace(x, bytes_per_element=bits // 8) for x in (SHORT, LONG)]
    before, after = (
        [choose(x, each, layouts=ALL_LAYOUTS).candidates for x in workloads]
        for each in (machine, changed)
    )
    assert before != after


FAST = candidate(RING, 1.00, peak_extra_bytes=200, kernels=8)
SMALL = candidate(ALL_GATHER, 1.04, peak_extra_bytes=100, kernels=9)
FEW = replace(SMALL, peak_extra_bytes=200, kernels=2)


@pytest.mark.parametrize(
    ("memory_budget", "first", "second", "options"),
    [
        # Where memory is scarce: 100 bytes are more than a small part of 200.
        (200, SMALL, FAST, {}),
        (200, FEW, FAST, {}),
        (200, FAST, replace(FEW, kernels=8), {}),
        (200, FAST, replace(SMALL, seconds=1.06), {}),
        (200, FAST, SMALL, {"tie_fraction": 0.0}),
        # Where there is memory: the large one takes PLENTY of the budget, no more.
        (200 / PLENTY, FAST, SMALL, {}),
        (200 / PLENTY, FEW, FAST, {}),
        (200 / PLENTY, FAST, replace(SMALL, kernels=8), {}),
        (200 / PLENTY, FAST, replace(FEW, peak_extra_bytes=201), {}),
    ],
)
def test_a_tie_goes_to_less_memory_then_fewer_kernels_then_time(
    memory_budget, first, second, options
) -> None:
    for candidates in ([first, second], [second, first]):
        found = rank(candidates, memory_budget=memory_budget, **options)
        assert found == (first, second)


def test_excluded_candidates_come_last_and_those_for_memory_before_them() -> None:
    slow = candidate(ALL_GATHER, 1e6)
    large = candidate(ULYSSES, 1.0, excluded="memory")
    assert rank([out(RING), large, slow]) == (slow, large, out(RING))


def test_making_a_layout_costs_time_and_bytes() -> None:
    made = choose(replace(LLAMA, relayout=True), H100, layouts=ALL_LAYOUTS)
    there = choose(LLAMA, H100, layouts=ALL_LAYOUTS)
    costs = {c.label: c for c in there.candidates}
    for each in made.candidates:
        before = costs[each.label.removesuffix(" relaid")]
        if each.layout is Layout.CONTIGUOUS:
            assert each == before
        else:
            assert (each.seconds or 0) > (before.seconds or 0)
            assert (each.wire_bytes or 0) > (before.wire_bytes or 0)


RATES = [x for x in NUMBERS if x.endswith("per_second")] + ["network_cards_per_node"]


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from(RATES),
    factor=st.floats(1.0, 100.0),
    hardware=st.sampled_from(["h100", "a800", "rtx4090", "l20", "mi300x", "cpu"]),
    length=st.sampled_from([1000, 8192, 131072]),
    ranks=st.sampled_from([2, 6, 8, 32]),
    causal=st.booleans(),
)
def test_a_faster_machine_is_never_slower(
    rate: str, factor: float, hardware: str, length: int, ranks: int, causal: bool
) -> None:
    slow = load_profile(hardware)
    fast = slow.with_overrides({rate: factor * getattr(slow, rate)})
    load = replace(TRAINING, q_len=length, kv_len=length, ranks=ranks, causal=causal)
    for each in choose(load, slow, memory_budget=1e18).candidates:
        form = Candidate(each.strategy, each.degrees, each.layout)
        faster = predict(form, load, fast, 1e18).seconds
        assert (faster is None) == (each.seconds is None)
        assert faster is None or faster <= (each.seconds or 0) * (1 + 1e-12)


def test_choosing_is_fast_after_the_first_time() -> None:
    """Processor time, which other processes lengthen less than the clock's."""
    choose(TRAINING, H100)
    start = time.process_time()
    for ranks in range(2, 52):
        choose(replace(TRAINING, ranks=ranks), H100)
    assert (time.process_time() - start) / 50 < 5e-3


def budgeted(budget: float, **changes: Any) -> Candidate:
    """Ulysses of a call whose heads are 8 for each of 8 ranks."""
    call = replace(TRAINING, heads=64, kv_heads=64, **changes)
    plan = choose(call, H100, strategy=ULYSSES, memory_budget=budget)
    return plan.chosen


def test_heads_are_exchanged_in_the_fewest_groups_that_fit() -> None:
    whole = budgeted(1e12)
    needs = [whole.peak_extra_bytes or 0]
    assert whole.head_groups == 1 and whole.label == "ulysses"
    for count in (4, 8):  # two, both of which are on their way, save nothing
        some = budgeted(needs[-1] - 1)
        assert some.head_groups == count and some.kernels == count
        assert some.label == f"ulysses in {count} groups of heads"
        assert some.wire_bytes == whole.wire_bytes
        needs.append(some.peak_extra_bytes or 0)
    assert needs == sorted(needs, reverse=True)


def test_what_groups_hide() -> None:
    tokens = {"q_len": 65536, "kv_len": 65536}
    whole = budgeted(1e12, **tokens)
    some = budgeted((whole.peak_extra_bytes or 0) - 1, **tokens)
    assert some.head_groups == 4
    assert whole.hidden_seconds == 0 and some.hidden_seconds
    assert whole.exposed_seconds and some.exposed_seconds
    assert some.exposed_seconds < whole.exposed_seconds


TOKEN = replace(LLAMA, q_len=1, causal=False, direction=Direction.FORWARD)
COST = STRATEGIES[Strategy.SPLIT_KV].cost(False, Layout.CONTIGUOUS, False)


def test_a_token_attends_to_split_keys() -> None:
    plan = choose(TOKEN, H100)
    assert plan.strategy is Strategy.SPLIT_KV
    others = [c for c in plan.candidates if c is not plan.chosen]
    assert {c.strategy for c in others} == set(SEQUENCE_STRATEGIES)
    assert {c.excluded for c in others} == {"a rank would have no query"}
    named = choose(TOKEN, H100, strategy=Strategy.RING)
    assert named.strategy is Strategy.RING and named.chosen.excluded is None


def test_a_rank_reads_its_part_of_the_keys() -> None:
    """131072 keys, with a kernel that takes no time and with that of an H100."""
    long = replace(TOKEN, kv_len=131072)
    elements = long.kv_heads * long.kv_len * (long.head_dim + long.value_dim)

    def seconds(profile: HardwareProfile, ranks: int) -> float:
        chosen = choose(replace(long, ranks=ranks), profile).chosen
        assert chosen.strategy is Strategy.SPLIT_KV
        assert chosen.seconds is not None and chosen.exposed_seconds is not None
        return chosen.seconds - chosen.exposed_seconds

    free = replace(NO_COMPUTATION, memory_bytes_per_second=1e12)
    for ranks in (1, 2, 8):
        read = elements * long.bytes_per_element / ranks / 1e12
        assert seconds(free, ranks) == pytest.approx(read, rel=0.06)
    assert seconds(H100, 8) < seconds(H100, 1) / 6


@pytest.mark.parametrize(
    "workload",
    [
        replace(TOKEN, q_len=8),
        replace(TOKEN, direction=Direction.BOTH),
        replace(TOKEN, q_len=2, ranks=2),
    ],
)
def test_queries_that_can_be_shared_out(workload) -> None:
    named = {c.strategy for c in choose(workload, H100).candidates}
    assert Strategy.SPLIT_KV not in named


def test_messages_are_partial_results() -> None:
    """Sizes of `at`: B 2, H 8, E 32, 4 ranks; (out, lse) of every query in float32."""
    sent = 3 * 4 * 2 * 8 * 4 * (32 + 1)
    assert at(COST.wire_bytes, q_len=4) == sent
    same = replace(NO_COMPUTATION, collective_bytes_per_second=1e9)
    assert at(COST.transfer, same, q_len=4) == pytest.approx(sent / 1e9)
    assert at(COST.seconds, same, q_len=4) == pytest.approx(sent / 1e9)
    for expression in (COST.transfer, COST.wire_bytes, COST.exposed):
        assert at(expression, ranks=1, q_len=1) == 0
