"""Plans as JSON."""

import json
from dataclasses import fields

import pytest

import cpcompile as cp
from cpcompile.cost.plain_data import to_dict, to_json
from cpcompile.cost.plans import Candidate, Plan, Strategy, Workload
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout


def a_plan(**changes):
    sizes = {"batch": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "seq": 4096}
    return cp.plan(ranks=4, **(sizes | changes))


def test_a_candidate():
    candidate = Candidate(
        Strategy.HYBRID, CPDegrees(2, 4, "ring"), Layout.FOLD, 1.5, 0.5, 0.25, 10, 20, 4
    )
    assert to_dict(candidate) == {
        "strategy": "hybrid",
        "degrees": {"ulysses": 2, "ring": 4, "inner": "ring"},
        "layout": "fold",
        "seconds": 1.5,
        "exposed_seconds": 0.5,
        "hidden_seconds": 0.25,
        "wire_bytes": 10,
        "peak_extra_bytes": 20,
        "kernels": 4,
        "relayout": False,
        "head_groups": 1,
        "excluded": None,
        "label": "hybrid 4 (ring) in 2 fold",
    }


def test_a_plan_has_all_its_fields():
    plan = a_plan()
    record = json.loads(to_json(plan))
    assert set(record) == {f.name for f in fields(Plan)} | {"runner_up", "hardware"}
    assert set(record["workload"]) == {f.name for f in fields(Workload)}
    assert record["candidates"] == [to_dict(c) for c in plan.candidates]
    assert record["chosen"] == record["candidates"][0]
    assert record["workload"]["direction"] == "both"
    assert plan.runner_up is not None
    assert record["runner_up"] == plan.runner_up.label


def test_excluded_candidates_have_their_reason():
    plan = a_plan(seq=128, kv_seq=64, layout="auto")
    reasons = {c["excluded"] for c in to_dict(plan)["candidates"]}
    assert "zigzag needs as many queries as keys" in reasons
    with pytest.raises(TypeError, match="object has no form in JSON"):
        to_dict([object()])
