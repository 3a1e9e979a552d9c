"""What TORCH_TRACE gets: the graph before and after each pass, and every plan."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor import config as inductor_config
from torch._logging._internal import trace_log

import cpcompile as cp
from cpcompile.cost.plain_data import to_dict
from cpcompile.passes.pipeline import JOINT, MODEL, WHOLE


class Artifacts(logging.Handler):
    """Payloads of our artifacts, by name."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def emit(self, record):
        given = record.metadata.get("artifact", {})
        if given.get("name", "").startswith("cp_"):
            self.found[given["name"]] = (given["encoding"], record.payload)


def attend(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def compiled(mesh):
    """What is explained and traced of a call."""
    artifacts = Artifacts()
    trace_log.addHandler(artifacts)
    try:
        options = {"mesh": mesh, "shard": {"q": 2}, "inner": "aot_eager"}
        options |= {"strategy": "ring", "layout": "zigzag"}
        step = torch.compile(attend, backend="cp", options=options)
        return cp.explain(step, torch.randn(1, 2, 16, 8)), artifacts.found
    finally:
        trace_log.removeHandler(artifacts)


def test_graphs_and_plans_are_traced(mesh):
    explanation, found = compiled(mesh)
    assert {name: encoding for name, (encoding, _) in found.items()} == {
        "cp_before": "string",
        "cp_find_attention": "string",
        "cp_choose_strategy": "string",
        "cp_insert_attention": "string",
        "cp_plan": "json",
        "cp_localise": "string",
    }
    (traced,) = json.loads(found["cp_plan"][1])
    (call,) = explanation.calls
    assert traced["attention"] == call.path
    assert traced["plan"] == json.loads(json.dumps(to_dict(call.plan)))
    assert traced["plan"]["chosen"]["strategy"] == call.plan.strategy.value


def test_passes_are_timed_as_those_of_torch(mesh):
    known = {key: len(times) for key, times in compilation_time_metrics.items()}
    compiled(mesh)
    for run in (*MODEL, *WHOLE):
        key = f"pass.cp_{run.__name__}"
        assert len(compilation_time_metrics[key]) == known.get(key, 0) + 1


@pytest.mark.parametrize("disabled", ["", "cp_insert_attention"])
def test_settings_of_torch(mesh, disabled):
    """A pass that the user disables does not run; changes of others are followed."""
    settings = {"trace.provenance_tracking_level": 1, "disabled_passes": disabled}
    with inductor_config.patch(settings):
        _, found = compiled(mesh)
    assert "cp_localise" in found
    assert ("cp_insert_attention" in found) == (not disabled)


@pytest.mark.parametrize(
    ("disabled", "left"),
    [
        ("", ["sink_slices", "tile_tokens", "save_before_writes", "record_mixers"]),
        ("cp_tile_tokens", ["sink_slices", "save_before_writes", "record_mixers"]),
        ("cp_sink_slices,cp_record_mixers", ["tile_tokens", "save_before_writes"]),
    ],
)
def test_passes_on_the_joint_graph_run_as_the_others_do(mesh, disabled, left):
    """AOTAutograd calls them; they are timed, and can be switched off, by name."""
    known = {key: len(times) for key, times in compilation_time_metrics.items()}
    with inductor_config.patch(disabled_passes=disabled):
        compiled(mesh)
    ran = [
        run.__name__
        for run in JOINT
        if len(compilation_time_metrics.get(key := f"pass.cp_{run.__name__}", []))
        > known.get(key, 0)
    ]
    assert ran == left
