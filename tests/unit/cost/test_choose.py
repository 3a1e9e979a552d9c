"""Which candidate is chosen, where that changes, and why some are out."""

import time
from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.cost.choose import PLENTY, choose, predict, rank
from cpcompile.cost.crossover import Interval, region, regions, with_length
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


def candidate(strategy: Strategy, seconds: float, **changes: Any) -> Candidate:
    costs: dict[str, Any] = {"peak_extra_bytes": 0, "kernels": 1}
    return Candidate(strategy, CPDegrees(1, 8), seconds=seconds, **{**costs, **changes})


def out(strategy: Strategy) -> Candidate:
    return Candidate(strategy, CPDegrees(1, 8), excluded="for a reason")


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


def test_excluded_candidates() -> None:
    slow = candidate(ALL_GATHER, 1e6)
    large = candidate(ULYSSES, 1.0, excluded="memory")
    assert rank([out(RING), large, slow]) == (slow, large, out(RING))
    free = choose(LLAMA, H100)
    least = min(c.peak_extra_bytes or 0 for c in free.candidates)
    plan = choose(LLAMA, H100, memory_budget=least)
    possible = [c for c in plan.candidates if c.excluded is None]
    assert {c.peak_extra_bytes for c in possible} == {least}
    tight = next(c for c in plan.candidates if c.excluded is not None)
    assert tight.seconds is not None
    assert_expected_inline(
        f"{tight.label}: {tight.excluded}",
        """ring: needs 40.0 MiB of extra memory per rank, and the budget is 36.0 MiB""",
    )


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
    # 131072 keys, with a kernel that takes no time and with that of an H100.
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
    # Sizes of `at`: B 2, H 8, E 32, 4 ranks; (out, lse) of every query in float32.
    sent = 3 * 4 * 2 * 8 * 4 * (32 + 1)
    assert at(COST.wire_bytes, q_len=4) == sent
    same = replace(NO_COMPUTATION, collective_bytes_per_second=1e9)
    assert at(COST.transfer, same, q_len=4) == pytest.approx(sent / 1e9)
    assert at(COST.seconds, same, q_len=4) == pytest.approx(sent / 1e9)
    for expression in (COST.transfer, COST.wire_bytes, COST.exposed):
        assert at(expression, ranks=1, q_len=1) == 0


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


def within(mib: int, **options: Any) -> dict[str, Any]:
    return {"memory_budget": mib << 20, **options}


HEADS = (
    "32 query heads are not a multiple of 5 key/value heads; repeat the key/value "
    "heads in the model"
)
LEAST = (
    "of extra memory per rank, and the budget is 1.0 MiB; that is the smallest need: "
    "raise memory_budget, or use more ranks"
)


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        (
            {},
            {"strategy": HYBRID, "degrees": CPDegrees(3, 2)},
            "strategy hybrid is impossible here: 3 in 2 (ring) are 6 ranks, and there "
            "are 8; give two factors of 8",
        ),
        (
            {"ranks": 7},
            {"strategy": HYBRID},
            "strategy hybrid is impossible here: 7 ranks have no two factors",
        ),
        (
            {"kv_heads": 5},
            {"strategy": RING},
            f"strategy ring is impossible here: {HEADS}",
        ),
        (
            {},
            within(1, strategy=ALL_GATHER),
            "strategy all_gather is impossible here: all_gather needs 64.0 MiB "
            f"{LEAST}",
        ),
        (  # no groups where ranks have other numbers of heads
            {"heads": 20, "kv_heads": 20, "direction": Direction.BOTH},
            within(1, strategy=ULYSSES),
            "strategy ulysses is impossible here: ulysses needs",
        ),
    ],
)
def test_what_is_said_if_nothing_is_left(changes, options, text) -> None:
    with pytest.raises(RewriteError) as caught:
        choose(replace(LLAMA, **changes), H100, **options)
    message = str(caught.value)
    assert message == text or (text.endswith("needs") and message.startswith(text))


def test_more_ranks_than_heads() -> None:
    """No reason to be out: heads are padded, and what that costs is charged."""
    few = replace(LLAMA, heads=2, kv_heads=1, q_len=2**17, kv_len=2**17)
    plan = choose(few, H100, layouts=(Layout.ZIGZAG,))
    assert {c.excluded for c in plan.candidates} == {None}
    ulysses = next(c for c in plan.candidates if c.strategy is ULYSSES)
    # 6 of 8 ranks attend to nothing but zeros.
    loss = (ulysses.seconds or 0) / (plan.chosen.seconds or 1)
    assert loss == pytest.approx(8 / 2, rel=0.05)


NOT_CAUSAL = replace(LLAMA, causal=False, ranks=4)
PROFILE = load_profile("a800_pcie")


def changing_at(*edges: int):
    """A decision that changes at each of `edges`, and is impossible after the last."""

    def changed(size: int) -> Plan:
        index = sum(size >= edge for edge in edges)
        if index == len(edges):
            raise RewriteError("too long")
        chosen = Candidate(Strategy.HYBRID, CPDegrees(index + 2, 2), seconds=1.0)
        return Plan(NOT_CAUSAL, chosen, False, PROFILE, (chosen,))

    return changed


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(2, 10**6), min_size=1, max_size=4, unique=True),
    st.integers(1, 2 * 10**6),
)
def test_edges_are_found_to_the_token(edges: list[int], size: int) -> None:
    # Edges that a grid of factor 2 ** (1/4) cannot miss.
    edges = sorted(edges)
    kept = [e for e, n in zip(edges, [*edges[1:], 10**9], strict=True) if n > 1.5 * e]
    found = region(changing_at(*kept), size, 1, 10**7)
    low = max([1, *(e for e in kept if e <= size)])
    high = min([10**7, *(e for e in kept if e > size)])
    assert (found.low, found.high) == (low, high)


def test_regions() -> None:
    found = regions(changing_at(100, 1000), 1, 5000)
    assert found == [
        Interval(1, 100, "hybrid 2 in 2 (ring)"),
        Interval(100, 1000, "hybrid 3 in 2 (ring)"),
        Interval(1000, 5000, None),
    ]
    crossed = replace(NOT_CAUSAL, q_len=1000, kv_len=500)
    assert with_length(crossed, 4000) == replace(crossed, q_len=4000, kv_len=2000)
