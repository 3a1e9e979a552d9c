"""The choice for fewer queries than ranks, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Direction, Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import H100, LLAMA, NO_COMPUTATION, at

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
