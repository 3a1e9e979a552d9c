"""Words of plans."""

from dataclasses import replace

from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.plans import Candidate, Degrees, Strategy
from cpcompile.reporting.tables import (
    candidate_row,
    degrees_text,
    duration,
    runner_up_text,
    text_table,
    workload_text,
)


def test_columns():
    rows = [("name", "ms", "why"), ("ring", "12.5", ""), ("all_gather", "3.25", "a")]
    assert_expected_inline(
        text_table(rows),
        """\
  name          ms  why
  ring        12.5
  all_gather  3.25  a""",
    )


def test_an_excluded_candidate_has_no_numbers():
    candidate = Candidate(Strategy.RING, Degrees(1, 4), excluded="it is")
    assert candidate_row(candidate) == (
        *("ring", "4", "contiguous", "", "", "", "", "", ""),
        "it is",
    )


def test_degrees():
    hybrid = Candidate(Strategy.HYBRID, Degrees(2, 4, "ring"))
    assert degrees_text(hybrid) == "4 (ring) in 2"
    assert degrees_text(Candidate(Strategy.ULYSSES, Degrees(8, 1))) == "8"


def test_the_runner_up():
    plan = cp.plan(batch=1, heads=8, kv_heads=8, head_dim=64, seq=4096, ranks=2)
    best = replace(plan.chosen, seconds=1.0)
    slower = replace(plan.candidates[1], seconds=1.04)
    pair = replace(plan, chosen=best, candidates=(best, slower))
    assert runner_up_text(pair, 0.05) == f"{slower.label} +4 % (tie)"
    assert runner_up_text(pair, 0.01) == f"{slower.label} +4 %"
    assert runner_up_text(replace(pair, candidates=(best,)), 0.05) == "none"


def test_a_workload():
    plan = cp.plan(
        batch=2, heads=8, kv_heads=8, head_dim=64, seq=64, kv_seq=32, ranks=2
    )
    workload = replace(plan.workload, value_dim=32, causal=False)
    assert workload_text(workload) == (
        "64 tokens on 32 keys, batch 2, 8 heads, head dim 64 (32 of values), "
        "16 bits per element, not causal, forward and backward"
    )


def test_durations():
    assert [duration(s) for s in (1.5, 0.25)] == ["1.500 s", "250.000 ms"]
