"""Words of plans."""

from dataclasses import replace

from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.cost.plans import Candidate, Strategy
from cpcompile.cost.plans.tables import (
    candidate_row,
    degrees_text,
    duration,
    text_table,
    workload_text,
)
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.plan_facts import candidate_notes, plan_layouts


def test_columns():
    rows = [("name", "ms", "why"), ("ring", "12.5", ""), ("all_gather", "3.25", "a")]
    assert_expected_inline(
        text_table(rows),
        """\
  name          ms  why
  ring        12.5
  all_gather  3.25  a""",
    )


def test_words_of_a_candidate():
    candidate = Candidate(Strategy.RING, CPDegrees(1, 4), excluded="it is")
    no_numbers = ("ring", "4", "contiguous", "", "", "", "", "", "", "it is")
    assert candidate_row(candidate) == no_numbers
    hybrid = Candidate(Strategy.HYBRID, CPDegrees(2, 4, "ring"))
    assert degrees_text(hybrid) == "4 (ring) in 2"
    assert degrees_text(Candidate(Strategy.ULYSSES, CPDegrees(8, 1))) == "8"
    assert [duration(s) for s in (1.5, 0.25)] == ["1.500 s", "250.000 ms"]


def test_the_runner_up():
    plan = cp.plan(batch=1, heads=8, kv_heads=8, head_dim=64, seq=4096, ranks=2)
    best = replace(plan.chosen, seconds=1.0)
    slower = replace(plan.candidates[1], seconds=1.04)
    pair = replace(plan, chosen=best, candidates=(best, slower))
    assert pair.runner_up_text(0.05) == f"{slower.label} +4 % (tie)"
    assert pair.runner_up_text(0.01) == f"{slower.label} +4 %"
    assert replace(pair, candidates=(best,)).runner_up_text(0.05) == "none"


def test_a_workload():
    plan = cp.plan(
        batch=2, heads=8, kv_heads=8, head_dim=64, seq=64, kv_seq=32, ranks=2
    )
    workload = replace(plan.workload, value_dim=32, causal=False)
    assert workload_text(workload) == (
        "64 tokens on 32 keys, batch 2, 8 heads, head dim 64 (32 of values), "
        "16 bits per element, not causal, forward and backward"
    )


def test_a_printed_plan():
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 4096}
    one, two = (str(cp.plan(**sizes, ranks=n, hardware="h100")) for n in (1, 2))
    assert_expected_inline(
        first_columns(one),
        """\
4096 tokens, batch 1, 8 heads, head dim 64, 16 bits per element, causal, f
predicted for h100_sxm, 8 ranks per node

1 rank: none, 0.242 ms per layer; runner-up none
   strategy  degrees  layout      ms/layer  exposed ms  hidden ms  wire MB
>  none            1  contiguous     0.242       0.000      0.000      0.0""",
    )
    assert_expected_inline(
        first_columns(two),
        """\
4096 tokens, batch 1, 8 heads, head dim 64, 16 bits per element, causal, f
predicted for h100_sxm, 8 ranks per node

2 ranks: ulysses, 0.327 ms per layer; runner-up all_gather zigzag +5 % (ti
   strategy    degrees  layout      ms/layer  exposed ms  hidden ms  wire
>  ulysses           2  contiguous     0.327       0.112      0.000      8
   all_gather        2  zigzag         0.343       0.114      0.000     16
   all_gather        2  striped        0.350       0.114      0.000     16
   all_gather        2  contiguous     0.395       0.114      0.000     16
   ring              2  contiguous     0.482       0.060      0.068     25
   ring              2  zigzag         0.482       0.060      0.068     25
   ring              2  striped        0.482       0.060      0.068     25""",
    )


def first_columns(text: str) -> str:
    return "\n".join(line[:74].rstrip() for line in text.splitlines())


def a_plan(**changes):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 8192}
    return cp.plan(**(sizes | {"ranks": 4} | changes))


def test_notes_group_candidates_by_reason():
    notes = candidate_notes(a_plan(kv_seq=4096))
    assert notes == [
        f"ring {x}, all_gather {x}, hybrid 2 in 2 (ring) {x}, "
        f"hybrid 2 (ring) in 2 {x} are out: {x} needs as many queries as keys"
        for x in ("zigzag", "striped")
    ]
    assert candidate_notes(a_plan()) == []


def test_layouts_stand_in_their_own_order():
    order = (Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED)
    assert plan_layouts(a_plan()) == order
    assert plan_layouts(a_plan(layout="fold")) == (Layout.FOLD,)
