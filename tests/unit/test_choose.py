"""Which strategy is chosen, in which order candidates are listed, and why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from cpcompile import config
from cpcompile.cost import choose, load_profile
from cpcompile.cost.choose import predict, rank
from cpcompile.errors import CannotRewrite
from cpcompile.plan import Candidate, Plan, Strategy, Workload

RING, ALL_GATHER = Strategy.RING, Strategy.ALL_GATHER
H100 = load_profile("h100_sxm")
NUMBERS = sorted(H100.sources)
SLOW_LINK = replace(
    H100,
    name="slow_link",
    link_bytes_per_second=12e9,  # PCIe without peer-to-peer access
    collective_bytes_per_second=12e9,
)
LLAMA = Workload(
    batch=1,
    heads=32,
    kv_heads=8,
    q_len=8192,
    kv_len=8192,
    head_dim=128,
    value_dim=128,
    bytes_per_element=2,
    causal=True,
    backward=False,
    ranks=8,
)


def lines(plan: Plan) -> str:
    """The plan as text: the decision, then a line per candidate."""
    how = "forced" if plan.forced else "chosen"
    rows = [f"{plan.strategy.value} {how}, {plan.layout}, {plan.hardware}"]
    for c in plan.candidates:
        assert c.seconds is not None and c.exposed_seconds is not None
        assert c.peak_extra_bytes is not None
        rows.append(
            f"{c.strategy.value}: {c.seconds * 1e3:.3f} ms, "
            f"{c.exposed_seconds * 1e3:.3f} ms exposed, "
            f"{c.peak_extra_bytes / 2**20:.1f} MiB, {c.kernels} kernels"
        )
    return "\n".join(rows)


def candidate(
    strategy: Strategy, seconds: float, peak: int = 0, kernels: int = 1
) -> Candidate:
    return Candidate(strategy, seconds, 0.0, peak, kernels)


def out(strategy: Strategy) -> Candidate:
    return Candidate(strategy, None, None, None, None, excluded="for a reason")


def test_small_kv_on_a_fast_link_is_gathered() -> None:
    assert_expected_inline(
        lines(choose(LLAMA, H100)),
        """\
all_gather chosen, contiguous, h100_sxm
all_gather: 0.552 ms, 0.099 ms exposed, 64.0 MiB, 2 kernels
ring: 0.767 ms, 0.000 ms exposed, 40.0 MiB, 8 kernels""",
    )


def test_long_full_attention_on_a_slow_link_rides_the_ring() -> None:
    long = replace(LLAMA, q_len=131072, kv_len=131072, kv_heads=32, causal=False)
    assert_expected_inline(
        lines(choose(long, SLOW_LINK)),
        """\
ring chosen, contiguous, slow_link
ring: 169.206 ms, 70.850 ms exposed, 1024.0 MiB, 8 kernels
all_gather: 253.342 ms, 156.602 ms exposed, 4096.0 MiB, 1 kernels""",
    )


def test_training_adds_the_backward() -> None:
    forward = choose(LLAMA, H100).chosen
    both = choose(replace(LLAMA, backward=True), H100, forward.strategy).chosen
    assert forward.seconds is not None and both.seconds is not None
    assert 2.5 < both.seconds / forward.seconds < 6
    assert forward.peak_extra_bytes is not None and both.peak_extra_bytes is not None
    assert both.peak_extra_bytes > forward.peak_extra_bytes
    assert both.kernels == forward.kernels  # counts the forward only


@pytest.mark.parametrize("field", NUMBERS)
def test_every_number_of_the_profile_counts(field: str) -> None:
    training = replace(LLAMA, backward=True)
    changed = replace(H100, **{field: 2 * getattr(H100, field)})
    differing = {
        strategy
        for strategy in Strategy
        if predict(strategy, training, H100).seconds
        != predict(strategy, training, changed).seconds
    }
    only = {
        "link_bytes_per_second": {RING},
        "collective_bytes_per_second": {ALL_GATHER},
    }
    assert differing == only.get(field, set(Strategy))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_only_training_looks_at_backward_rates(direction: str) -> None:
    fields = (f"{direction}_flops_per_second", f"causal_{direction}_flops_per_second")
    changed = replace(H100, **{f: 2 * getattr(H100, f) for f in fields})
    same = predict(RING, LLAMA, H100) == predict(RING, LLAMA, changed)
    assert same is (direction == "backward")


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_forced_strategy_is_chosen_and_all_are_listed(strategy: Strategy) -> None:
    free, forced = choose(LLAMA, H100), choose(LLAMA, H100, strategy)
    assert (free.forced, forced.forced) == (False, True)
    assert forced.strategy is strategy
    assert forced.candidates == free.candidates
    assert forced.chosen.strategy is strategy
    assert forced.runner_up is not None and forced.runner_up.strategy is not strategy


def test_one_rank_is_a_tie_without_exposed_time() -> None:
    plan = choose(replace(LLAMA, ranks=1), H100)
    first, second = plan.candidates
    assert first.seconds == pytest.approx(second.seconds, rel=1e-12)
    assert (first.exposed_seconds, second.exposed_seconds) == (0, 0)
    assert (first.excluded, second.excluded) == (None, None)


@pytest.mark.parametrize("strategy", [None, *Strategy])
def test_heads_that_do_not_group_exclude_every_strategy(
    strategy: Strategy | None,
) -> None:
    with pytest.raises(CannotRewrite) as caught:
        choose(replace(LLAMA, kv_heads=5), H100, strategy)
    assert str(caught.value) == (
        f"strategy {(strategy or RING).value} is impossible here: 32 query heads are "
        "not a multiple of 5 key/value heads; repeat the key/value heads in the model"
    )


def test_a_tie_goes_to_less_memory_then_fewer_kernels() -> None:
    fast = candidate(RING, 1.00, peak=200, kernels=8)
    small = candidate(ALL_GATHER, 1.04, peak=100, kernels=2)
    assert rank([fast, small]) == (small, fast)
    few = replace(small, peak_extra_bytes=200)
    assert rank([fast, few]) == (few, fast)
    many = replace(small, kernels=9)
    assert rank([fast, many]) == (many, fast)
    slow = replace(small, seconds=1.06)
    assert rank([slow, fast]) == (fast, slow)


def test_the_tie_fraction_is_a_setting() -> None:
    fast = candidate(RING, 1.00, peak=200)
    small = candidate(ALL_GATHER, 1.04, peak=100)
    with config.patch(tie_fraction=0.0):
        assert rank([small, fast]) == (fast, small)
        equal = replace(small, seconds=1.00)
        assert rank([fast, equal]) == (equal, fast)


def test_excluded_candidates_come_last() -> None:
    slow = candidate(ALL_GATHER, 1e6)
    assert rank([out(RING), slow]) == (slow, out(RING))


def test_choosing_is_fast_after_the_first_time() -> None:
    choose(LLAMA, H100)
    start = time.perf_counter()
    for ranks in range(2, 52):
        choose(replace(LLAMA, ranks=ranks), H100)
    assert (time.perf_counter() - start) / 50 < 5e-3
