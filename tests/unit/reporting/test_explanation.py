"""An explanation as text, as JSON and as a picture."""

import json
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plain_data import to_dict
from cpcompile.cost.plans import Strategy
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.passes.graph.graph_pass import PassRun
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import CallReport, GraphReport, ShardedInput

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


def test_where_tokens_enter(explanation):
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


def test_nothing_ran():
    empty = Explanation(())
    assert str(empty) == 'no graph compiled by backend="cp" ran in this call'
    assert json.loads(empty.to_json()) == {"graphs": []}


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


def test_calls_with_equal_plans_share_a_picture(explanation, tmp_path):
    explanation.draw(tmp_path / "calls.svg")
    text = (tmp_path / "calls.svg").read_text()
    assert text.count(">2 calls: crossovers<") == 1
    assert text.count(">last: crossovers<") == 1


def test_nothing_to_draw(tmp_path):
    with pytest.raises(cp.errors.InputError, match="none of 0 attention calls has a p"):
        Explanation(()).draw(tmp_path / "calls.svg")
