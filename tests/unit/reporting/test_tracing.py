"""Traces of torch.profiler of all ranks become one."""

import json

import torch

from cpcompile.reporting.step_trace import merged, own_times, trace_text


def recorded():
    with torch.profiler.profile(acc_events=True) as profile:
        for name in ("cp: keys and values", "my own name"):
            with torch.profiler.record_function(name):
                x = torch.randn(4, 4, requires_grad=True)
                (x @ x).sum().backward()
    return profile


def test_a_trace_has_a_process_per_rank():
    text = trace_text(recorded())
    trace = json.loads(merged([text, text], ["a table"]))
    assert trace["otherData"]["about"] == ["a table"]
    events = trace["traceEvents"]
    names = [x["args"]["name"] for x in events if x["name"] == "process_name"]
    assert {x.split(":")[0] for x in names} == {"rank 0", "rank 1"}
    spans = [x for x in events if x["name"] == "cp: keys and values"]
    assert len({x["pid"] for x in spans}) == 2 and len({x["ts"] for x in spans}) == 1
    arrows = [x["id"] for x in events if x["ph"] == "s"]
    assert arrows and len(arrows) == len(set(arrows))
    table = own_times(recorded())
    assert "cp: keys and values" in table
    assert "my own name" not in table and "aten::mm" not in table


def test_clocks_of_other_hosts_are_brought_to_the_first():
    text = trace_text(recorded())
    clocks = [("a", 1000), ("a", 7000), ("b", 5_001_000), ("b", 5_004_000)]
    events = json.loads(merged([text] * 4, clocks=clocks))["traceEvents"]
    first, second, third, fourth = (
        x["ts"] for x in events if x["name"] == "cp: keys and values"
    )
    assert first == second
    assert (third, fourth) == (first - 5000, first - 5000)
