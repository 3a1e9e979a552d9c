"""One step on several ranks, measured: the setting `profile`, and `cpcompile trace`."""

import json
import subprocess
import sys

import pytest
import torch

import cpcompile as cp
from tests.cpu.attention_cases import compiled_on
from tests.cpu.verification.models import make_inputs, make_model

MESSAGE = "keys and values of the {} of ring attention, step 0"


def train(path, steps):
    """So many steps; returns the names that torch.profiler shows of the last one."""
    model = make_model()
    if path is None:
        torch._dynamo.reset()  # or the program that records would run
    step = compiled_on(2, model, strategy="ring")
    with cp.config.patch(hardware="cpu", profile=path):
        for _ in range(steps):
            step(**make_inputs())["loss"].backward()
        if path is not None:
            return []
        with torch.profiler.profile() as profile:
            step(**make_inputs())["loss"].backward()
    return [x.key for x in profile.key_averages()]


def test_the_setting_writes_the_third_step_of_all_ranks(pools, tmp_path):
    path = tmp_path / "trace.json"
    pools[2].run(train, str(path), 3, timeout=150)
    assert not path.exists()  # the step ends with the next call
    pools[2].run(train, str(path), 1, timeout=150)
    events = json.loads(path.read_text())["traceEvents"]
    for rank in (0, 1):
        pids = {
            x["pid"] for x in events if str(x.get("args")).find(f"rank {rank}:") > 0
        }
        names = {x["name"] for x in events if x["pid"] in pids and x["ph"] == "X"}
        assert {"cp::ring_attention", "cp::ring_attention_backward"} <= names
        assert {"cp: forward of forward", "CompiledFunctionBackward"} <= names
        for direction in ("forward", "backward"):
            message = f"cp: {MESSAGE.format(direction)}"
            assert any(name.startswith(message) for name in names)


def test_torch_profiler_shows_strategies_and_steps(pools):
    for names in pools[2].run(train, None, 1, timeout=150):
        assert {"cp::ring_attention", "cp::attention_step"} <= set(names)
        assert any(x.startswith(f"cp: {MESSAGE.format('backward')}") for x in names)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_the_command_writes_a_trace_and_a_picture(tmp_path, inner):
    command = [sys.executable, "-m", "cpcompile", "trace"]
    command += ["tests.cpu.verification.models:make_model_and_inputs", "--world", "2"]
    command += ["--inner", inner, "--strategy", "ring", "--out", f"{tmp_path}/t.json"]
    command += ["--plot", f"{tmp_path}/t.svg"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stderr
    shown, measured = done.stdout.split("\nmeasured on rank 0:\n")
    assert "attention" in shown and "cp: forward of forward" in measured
    trace = json.loads((tmp_path / "t.json").read_text())
    assert any("ring (forced)" in line for line in trace["otherData"]["about"])
    assert "<svg" in (tmp_path / "t.svg").read_text()
