"""Plans and explanations as text, as JSON and as a picture, and wrong arguments."""

import json
from dataclasses import replace
from typing import Any

import pytest
from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plain_data import to_dict
from cpcompile.cost.plans import Candidate, Direction, Plan, Strategy
from cpcompile.cost.plans.tables import (
    candidate_row,
    degrees_text,
    duration,
    text_table,
    workload_text,
)
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import CallReport, GraphReport, ShardedInput
from cpcompile.reporting.plan_facts import candidate_notes, plan_layouts

CPU = load_profile("cpu")


def a_plan(tokens=512, **choice):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 4, "head_dim": 16, "ranks": 4}
    workload = cp.plan(seq=tokens, dtype="float32", **sizes).workload
    return choose(workload, CPU, **choice)


def a_call(path, plan, tokens=512, reason=None):
    shape = (1, 4, tokens, 16)
    return CallReport(
        path=path,
        query=shape,
        key=shape,
        dtype="float32",
        mask="causal" if plan is not None else "tensor",
        plan=plan,
        reason=reason,
        kernel=None if plan is None else "aten_flash",
    )


def a_graph(*calls, gathered=()):
    passes = (PassRun("choose_strategy", len(calls), 0.5),)
    return GraphReport("forward", 4, calls, passes, gathered, 7, 1, 7)


@pytest.fixture
def explanation():
    mesh = CPDegrees(2, 2)
    auto, forced = a_plan(), a_plan(1024, strategy=Strategy.ALL_GATHER, degrees=mesh)
    return Explanation(
        (
            a_graph(
                a_call("layers.0", auto),
                a_call("layers.1", auto),
                a_call("last", forced, 1024),
                a_call("masked", None, reason="a mask is not read"),
                gathered=("logits [1, 512, 256]",),
            ),
        )
    )


def without_numbers(text):
    """Milliseconds and percentages change with the profile; the table does not."""
    words = [line.split("  ") for line in text.splitlines()]
    return "\n".join(
        " | ".join(cell.strip() for cell in line if cell.strip()) for line in words
    )


def test_one_line_per_call(explanation):
    """Shapes, mask, layout, strategy, ranks, kernel, and numbers of the plan."""
    header, *rows = without_numbers(str(explanation)).splitlines()[1:6]
    assert header == (
        "attention | q | k/v | mask | layout | strategy | ranks | kernel | ms | exposed"
        " | runner-up | excluded"
    )
    first, second, forced, masked = (row.split(" | ") for row in rows)
    auto = explanation.calls[0].plan
    assert first == [
        "layers.0",
        "[1, 4, 512, 16] float32",
        "4 heads x 512",
        "causal",
        "contiguous",
        auto.strategy.value,
        "4",
        "aten_flash",
        f"{1e3 * auto.chosen.seconds:.3f}",
        f"{1e3 * auto.chosen.exposed_seconds:.3f}",
        first[10],
    ]
    gap = auto.runner_up.seconds / auto.chosen.seconds - 1
    assert first[10].startswith(f"{auto.runner_up.label} {100 * gap:+.0f} %")
    assert second[0] == "layers.1" and second[1:] == first[1:]
    assert forced[5] == "all_gather (forced)" and forced[-1] == "[1]"
    assert masked[3:] == ["tensor", "not rewritten", "a mask is not read"]


def test_notes_below_the_table(explanation):
    notes = str(explanation).splitlines()[6:]
    assert_expected_inline(
        "\n".join(notes),
        """\
  predicted for cpu
  [1] hybrid 2 (ring) in 2 is out: the mesh is 2 in 2 (ring)
  gathered output: logits [1, 512, 256]""",
    )
    (graph,) = explanation.graphs
    inputs = ShardedInput("ids", 1, True, (2, 8)), ShardedInput("batch.x", 2, False)
    graph = replace(graph, inputs=inputs, began=("patches conv2d [2, 8, 36]",))
    first, second, third, *_ = str(Explanation((graph,))).splitlines()[6:]
    assert first == "  sharded inputs: ids dim 1 (inferred), batch.x dim 2 (given)"
    assert second == "  tokens begin at: patches conv2d [2, 8, 36]"
    assert third == "  predicted for cpu"
    (as_json,) = json.loads(Explanation((graph,)).to_json())["graphs"]
    ids = {"name": "ids", "dim": 1, "inferred": True, "sizes": [2, 8]}
    assert as_json["inputs"][0] == ids


def test_what_is_drawn(tmp_path, explanation):
    empty = Explanation(())
    assert str(empty) == 'no graph compiled by backend="cp" ran in this call'
    assert json.loads(empty.to_json()) == {"graphs": []}
    with pytest.raises(cp.errors.InputError, match="none of 0 attention calls has a p"):
        Explanation(()).draw(tmp_path / "calls.svg")
    explanation.draw(tmp_path / "calls.svg")
    text = (tmp_path / "calls.svg").read_text()
    assert text.count(">2 calls: crossovers<") == 1
    assert text.count(">last: crossovers<") == 1


def test_json_holds_calls_and_candidates(explanation):
    (graph,) = json.loads(explanation.to_json())["graphs"]
    assert (graph["frame"], graph["ranks"]) == ("forward", 4)
    assert graph["gathered"] == ["logits [1, 512, 256]"]
    assert graph["passes"][0]["name"] == "choose_strategy"
    first, _, forced, masked = graph["calls"]
    assert first["path"] == "layers.0" and first["query"] == [1, 4, 512, 16]
    assert first["kernel"] == "aten_flash"
    assert first["plan"] == to_dict(explanation.calls[0].plan)
    assert forced["plan"]["forced"] is True
    excluded = {c["excluded"] for c in forced["plan"]["candidates"]}
    assert excluded == {None, "the mesh is 2 in 2 (ring)"}
    assert masked["plan"] is None and masked["reason"] == "a mask is not read"


def test_words_of_plans():
    rows = [("name", "ms", "why"), ("ring", "12.5", ""), ("all_gather", "3.25", "a")]
    assert_expected_inline(
        text_table(rows),
        """\
  name          ms  why
  ring        12.5
  all_gather  3.25  a""",
    )
    candidate = Candidate(Strategy.RING, CPDegrees(1, 4), excluded="it is")
    no_numbers = ("ring", "4", "contiguous", "", "", "", "", "", "", "it is")
    assert candidate_row(candidate) == no_numbers
    hybrid = Candidate(Strategy.HYBRID, CPDegrees(2, 4, "ring"))
    assert degrees_text(hybrid) == "4 (ring) in 2"
    assert degrees_text(Candidate(Strategy.ULYSSES, CPDegrees(8, 1))) == "8"
    assert [duration(s) for s in (1.5, 0.25)] == ["1.500 s", "250.000 ms"]
    plan = cp.plan(batch=1, heads=8, kv_heads=8, head_dim=64, seq=4096, ranks=2)
    best = replace(plan.chosen, seconds=1.0)
    slower = replace(plan.candidates[1], seconds=1.04)
    pair = replace(plan, chosen=best, candidates=(best, slower))
    assert pair.runner_up_text(0.05) == f"{slower.label} +4 % (tie)"
    assert pair.runner_up_text(0.01) == f"{slower.label} +4 %"
    assert replace(pair, candidates=(best,)).runner_up_text(0.05) == "none"


def test_workloads_notes_and_layouts():
    plan = cp.plan(
        batch=2, heads=8, kv_heads=8, head_dim=64, seq=64, kv_seq=32, ranks=2
    )
    workload = replace(plan.workload, value_dim=32, causal=False)
    assert workload_text(workload) == (
        "64 tokens on 32 keys, batch 2, 8 heads, head dim 64 (32 of values), "
        "16 bits per element, not causal, forward and backward"
    )
    notes = candidate_notes(plan_of(kv_seq=4096))
    assert notes == [
        f"ring {x}, all_gather {x}, hybrid 2 in 2 (ring) {x}, "
        f"hybrid 2 (ring) in 2 {x} are out: {x} needs as many queries as keys"
        for x in ("zigzag", "striped")
    ]
    assert candidate_notes(plan_of()) == []
    order = (Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED)
    assert plan_layouts(plan_of()) == order
    assert plan_layouts(plan_of(layout="fold")) == (Layout.FOLD,)


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


def plan_of(**changes):
    sizes = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64, "seq": 8192}
    return cp.plan(**(sizes | {"ranks": 4} | changes))


SIZES = {
    "batch": 1,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "seq": 65536,
    "ranks": 8,
}


def planned(**changes: Any) -> Plan:
    return cp.plan(**{**SIZES, **changes})


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        planned(**changes)
    return str(caught.value)


def test_workloads_and_their_defaults() -> None:
    found = planned(dtype="float32", causal=False, direction="forward", kv_seq=4096)
    workload = found.workload
    assert (workload.batch, workload.heads, workload.kv_heads) == (1, 32, 8)
    assert (workload.q_len, workload.kv_len) == (65536, 4096)
    assert (workload.head_dim, workload.value_dim) == (128, 128)
    assert (workload.bytes_per_element, workload.causal) == (4, False)
    assert (workload.direction, workload.ranks) == (Direction.FORWARD, 8)
    assert found.hardware == "h100_sxm"
    assert not found.forced
    found = planned()
    assert planned(dtype="torch.bfloat16") == found == planned(dtype="bfloat16")
    assert found.workload.direction is Direction.BOTH
    assert found.workload.bytes_per_element == 2
    layouts = {c.layout for c in found.candidates}
    assert layouts == {Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED}
    assert {c.layout for c in planned(causal=False).candidates} == {Layout.CONTIGUOUS}
    assert {c.layout for c in planned(layout="fold").candidates} == {Layout.FOLD}


@pytest.mark.parametrize("value", [0, -1, 2.0, "8", True])
@pytest.mark.parametrize("name", [*SIZES, "ranks_per_node", "kv_seq", "value_dim"])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    message = refusal(**{name: value})
    assert message.startswith(f"cp.plan: {name} is {value!r}; needed a positive")


IMPOSSIBLE = "cp.plan: every strategy is impossible here: "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": 1 << 20}, f"{IMPOSSIBLE}ulysses in 4 groups of heads needs "
         "392.0 MiB of extra memory per rank, and the budget is 1.0 MiB; that is the "
         "smallest need: raise memory_budget, or use more ranks"),
        ({"kv_heads": 5}, f"{IMPOSSIBLE}32 query heads are not a multiple of 5 "
         "key/value heads; repeat the key/value heads in the model"),
        ({"causal": False, "layout": "zigzag"},
         f"{IMPOSSIBLE}zigzag balances causal attention only"),
        ({"dtype": "int8"}, "cp.plan: dtype is 'int8'; needed one of float64, float32, "
         "bfloat16, float16"),
        ({"direction": "sideways"}, "cp.plan: direction is 'sideways'; needed one of "
         "forward, backward, both"),
        ({"layout": "spiral"}, "cp.plan: layout is 'spiral'; needed one of auto, "
         "contiguous, zigzag, striped, fold"),
        ({"overrides": {"speed": 1.0}},
         "overrides: field 'speed' is unknown; did you mean 'alone_speedup'?"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes) == message
    assert "did you mean 'a100_sxm'?" in refusal(hardware="a10")
