"""`tools.bench step`: how a recorded step is shared out, and its tables."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from tools.bench.step.report import markdown
from tools.bench.step.shares import SHARES, WHOLE, Call, recorded, shares


def call(name, start, end):
    """Times in seconds."""
    return Call(name, int(start * 1e9), int((end - start) * 1e9))


def test_a_moment_belongs_to_the_innermost_known_call():
    found = shares(
        [
            call("before the step", 0, 1),
            call(WHOLE, 1, 12),
            call("cp::ring_attention", 2, 5),
            call("cp::ring_wait", 3, 4),
            call("aten::mm", 4, 4.5),  # of attention
            call("aten::addmm", 5, 6),
            call("aten::empty", 5.2, 5.4),
            call("_c10d_functional::wait_tensor", 6, 8),
            call("Optimizer.step#AdamW.step", 9, 11),
            call("aten::mul", 9, 10),
        ]
    )
    assert found == {
        "attention": 2,
        "matrix products": 1,
        "other token-wise work": 3,
        "optimizer": 2,
        "gradient reduction": 2,
        "waits for messages": 1,
    }


def test_a_step_is_recorded():
    x = torch.ones(64, 64)
    found = shares(recorded(lambda: x @ x))
    assert found["matrix products"] > 0
    assert found["attention"] == found["waits for messages"] == 0


def test_tables():
    def way(name, processes, threads=1, **more):
        about = {"way": name, "processes": processes, "threads": threads}
        return {**about, "growth": 2**20, "parameters": 2**21, **more}

    def step(seconds, ranks):
        used = [seconds] * ranks
        return {"seconds": seconds, "processor": used, "main": used}

    setup = dict.fromkeys(("torch", "python", "processor", "date"), "?")
    setup |= {"packages": {}, "rounds": 1, "tokens": 8192, "load_average": [0.0, 0.0]}
    run = {
        "model": "gpt",
        "rounds": [{"one thread": step(4.0, 1), "cp": step(2.5, 2)}],
        "about": [
            way("one thread", 1, shares=dict.fromkeys(SHARES, 1.0)),
            way("cp", 2, shares=dict.fromkeys(SHARES, 0.75)),
        ],
        "left_out": [{"way": "DeepSpeed AutoSP", "reason": "LeftOut: not imported"}],
    }
    lines = markdown({"setup": setup, "models": [run]}).splitlines()
    assert_expected_inline(
        "\n".join(x for x in lines if x.startswith(("| cp", "| DeepSpeed", "| gpt"))),
        """\
| cp | 2 x 1 | 2.50 | 3277 | 1.60 | 1 | 2.50 | 2.50 |
| DeepSpeed AutoSP | LeftOut: not imported |
| gpt | tokens/s of cp / one thread | >= 1.85 | 1.60 | missed by 13.5% | 1.60 | 1.60 |""",  # noqa: E501
    )
    assert "| together | 6.00 | 4.50 | +1.50 |" in lines
