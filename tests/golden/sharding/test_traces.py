"""What TORCH_TRACE gets: the graph before and after each pass, and every plan."""

import json
import logging

import torch
import torch.nn.functional as F
from torch._logging._internal import trace_log

import cpcompile as cp
from cpcompile.cost.records import to_dict


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


def test_graphs_and_plans_are_traced(mesh):
    artifacts = Artifacts()
    trace_log.addHandler(artifacts)
    try:
        options = {"mesh": mesh, "shard": {"q": 2}, "inner": "aot_eager"}
        options |= {"strategy": "ring", "layout": "zigzag"}
        step = torch.compile(attend, backend="cp", options=options)
        explanation = cp.explain(step, torch.randn(1, 2, 16, 8))
    finally:
        trace_log.removeHandler(artifacts)
    assert {name: encoding for name, (encoding, _) in artifacts.found.items()} == {
        "cp_before": "string",
        "cp_find_attention": "string",
        "cp_choose_strategy": "string",
        "cp_insert_attention": "string",
        "cp_shard_graph": "string",
        "cp_lay_out_tokens": "string",
        "cp_plan": "json",
    }
    (traced,) = json.loads(artifacts.found["cp_plan"][1])
    (call,) = explanation.calls
    assert traced["attention"] == call.path
    assert traced["plan"] == json.loads(json.dumps(to_dict(call.plan)))
    assert traced["plan"]["chosen"]["strategy"] == call.plan.strategy.value
