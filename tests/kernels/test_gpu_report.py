"""`python -m tools.gpu` without a GPU: all but the times themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from cpcompile.kernels import launch, render
from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import EVERY_KEY
from tools.gpu import binaries, configs, correctness, rates
from tools.gpu.report import SECTIONS
from tools.gpu.ring import Layout, ring_row
from tools.gpu.sections import Mode
from tools.gpu.tables import markdown
from tools.gpu.targets import Target, targets

ROOT = Path(__file__).parents[2]
SMOKE = """
import runpy
from tests.kernels.interpreter import install
install()
runpy.run_module("tools.gpu", run_name="__main__", alter_sys=True)
"""
# As if only torch, triton and what they need were there, beside the tree.
BARE = """
import runpy, sys
absent = "tests rich pytest expecttest hypothesis matplotlib transformers timm"
sys.modules.update(dict.fromkeys(absent.split()))
runpy.run_module("tools.gpu", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """What the report prints and writes in its smoke mode."""
    out = tmp_path_factory.mktemp("gpu_report")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    done = subprocess.run(
        [sys.executable, "-c", SMOKE, "--smoke", "--out", str(out)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((out / "gpu_report.json").read_text())
    text = (out / "gpu_report.md").read_text()
    yield SimpleNamespace(printed=done.stdout, record=record, text=text)


def test_smoke_runs_every_section(smoke):
    sections = smoke.record["sections"]
    assert set(sections) == {section.key for section in SECTIONS} == set("abcdef")
    rows = {key: section["rows"] for key, section in sections.items()}
    for key, section in sections.items():
        assert section["not_run"] == []
        assert [row for row in rows[key] if "error" in row] == [], key
        assert f"## {key}. {section['title']}" in smoke.text
    assert smoke.record["setup"]["command"].startswith("python -m tools.gpu --smoke")
    assert "not measured" in smoke.printed  # the shapes of the targets
    # The templates and what the compiler makes are right.
    assert len(rows["a"]) == len(correctness.plan(Mode("cpu", smoke=True)))
    assert {row["kernel"] for row in rows["a"]} == {kernel.value for kernel in Kernel}
    assert all(row["passed"] for row in rows["a"])
    assert [row["passed"] for row in rows["f"]] == [True] * 3
    # The ring is equal to float64.
    checks = {
        (r["ranks"], r["layout"]): r["passed"] for r in rows["d"] if "passed" in r
    }
    assert checks == {(n, layout.value): True for n in (2, 4) for layout in Layout}
    (timed,) = (row for row in rows["d"] if "rounds" in row)
    assert timed["tokens"] == 256 and timed["ratios"]["zigzag"] > 0
    # There is no cuDNN on a CPU, but the others have times.
    for row in rows["b"]:
        assert set(row["errors"]) == {"cudnn", "flex"} and "flash" in row["ms"]
        assert {"step"} < set(row["ms"]) or {"dkdv", "dq", "backward"} < set(row["ms"])
    assert "- cudnn: RuntimeError" in smoke.text


def test_binaries_are_those_that_were_launched(monkeypatch):
    kernel = SimpleNamespace(
        n_regs=168, n_spills=0, metadata=SimpleNamespace(shared=98304)
    )
    launched = {(1, 1, 1): lambda *args, **options: kernel}
    fake = render.RenderedKernel("", launched, ())
    monkeypatch.setattr(render, "rendered", lambda *args: fake)
    q = torch.randn(1, 1, 16, 16)
    with binaries.recorded() as kernels:
        for _ in range(2):
            launch.forward(q, q, q, None, None, EVERY_KEY, 0.25, True)
    (row,) = binaries.binary_rows(kernels, "forward", 1.0)
    assert (row["registers"], row["spills"], row["shared_bytes"]) == (168, 0, 98304)


def test_every_candidate_is_compiled_before_it_is_timed():
    with mock.patch.object(configs, "architecture", lambda device: "sm90"):
        mode = Mode("cuda")
        with mock.patch.object(torch.cuda, "current_device", lambda: 0):
            items = binaries.plan(mode)
            expected = {
                (item.kernel, item.dim, causal, config)
                for item in configs.plan(mode)
                for causal in (False, True)
                for config in configs.candidates(item.kernel, item.dim, mode)
            }
    found = {
        (x.kernel, x.dim, x.causal, x.config)
        for x in items
        if isinstance(x, binaries.CandidateItem)
    }
    assert found == expected
    flex = {x.rate for x in items if isinstance(x, binaries.FlexItem)}
    assert flex == set(rates.plan(mode))


def test_best_config_is_best_on_both_masks():
    rows = [
        {"full": 400.0, "causal": 200.0},
        {"full": 390.0, "causal": 390.0},
        {"full": 900.0, "causal": None},
    ]
    configs.mark_best(rows)
    assert [row["best"] for row in rows] == [False, True, False]


def test_ring_ratios():
    times = {"flash": 8.0, "cudnn": 6.0, "ours": 7.0}
    times |= {"zigzag 0": 3.0, "zigzag 1": 4.5, "contiguous 0": 2.0}
    row = ring_row(times, 2)
    assert row["ms"]["zigzag"] == 7.5 and "contiguous" not in row["ms"]
    assert row["ratios"] == pytest.approx(
        {"zigzag": 0.8, "zigzag slowest": 6 / 9, "zigzag of ours": 7 / 7.5}
    )


def rate_row(direction: str, tokens: int = 8192, **tflops: float) -> dict:
    return {
        "item": f"D=128 S={tokens} full",
        "dim": 128,
        "tokens": tokens,
        "causal": False,
        "direction": direction,
        "tflops": tflops,
        "ms": {},
        "spread": {"step": 0.01},
        "errors": {},
    }


MADE_UP = {
    "a": [
        {"case": "causal", "kernel": "attention_step", "ratios": {"out": 0.5}},
        {"item": "dq", "error": "Traceback ...\nRuntimeError: out of shared memory"},
    ],
    "b": [
        rate_row("forward", step=495.0, step_acc=441.0, flex=450.0),
        rate_row("forward", tokens=1024, step=90.0, flex=100.0),
        rate_row("backward", backward=330.0),
    ],
    "d": [{"item": "S=32K N=4", "tokens": 32768, "ranks": 4}],
}
MADE_UP["a"][0] |= {"item": "forward", "passed": True}
MADE_UP["d"][0]["ratios"] = {"zigzag": 0.97, "zigzag of ours": 0.873}
MADE_UP["d"][0] |= {"rounds": 3, "ms": {"flash": 1.0}, "tflops": {}}


def test_targets_of_made_up_numbers():
    found = {t.name: t for t in targets(MADE_UP)}
    shape = "bf16 D=128 8K x 8K full"
    verdicts = {
        f"forward of {shape}, TFLOP/s": "met by 10.0%",
        f"forward with accumulators of {shape}, TFLOP/s": "missed by 2.0%",
        f"backward of {shape}, TFLOP/s": "met by 10.0%",
        f"backward with accumulators of {shape}, TFLOP/s": "not measured",
        f"forward of {shape} / FlexAttention": "met by 10.0%",
        "forward / FlexAttention, worst shape (D=128 S=1024 full, of 2)": (
            "missed by 10.0%"
        ),
        "one attention by the fastest kernel / zigzag ring, S=32K N=4": "met by 0.0%",
        "one attention by the fastest kernel / zigzag ring, S=32K N=8": "not measured",
        "one attention by the same kernel / zigzag ring, S=32K N=4": "missed by 10.0%",
        "one attention by the same kernel / zigzag ring, S=32K N=8": "not measured",
        "share of right results (1 of 2)": "missed by 50.0%",
    }
    assert {name: target.verdict for name, target in found.items()} == verdicts
    assert all(target.met is None for target in targets({})[:-1])
    assert Target("", 2.0, 1.0).met is False


def test_tables_name_errors_and_what_was_not_run():
    sections = {
        key: {
            "title": f"Section {key}",
            "seconds": 3.0,
            "rows": rows,
            "not_run": ["S=128K N=8"] if key == "d" else [],
            "why_not_run": "its 3 s were over",
        }
        for key, rows in MADE_UP.items()
    }
    setup = dict.fromkeys(
        ("device", "driver", "torch", "triton", "cuda", "cudnn", "python", "date"), "x"
    )
    setup |= {"command": "python -m tools.gpu", "seconds": 9.0, "processor": "x"}
    setup["load_average"] = [0.1, 2.0]
    text = markdown({"setup": setup, "sections": sections})
    assert "Not run (1): its 3 s were over.\n\n- S=128K N=8\n" in text
    assert "Error in dq:\n\n```\nTraceback ...\nRuntimeError: out of shared" in text
    assert "| D=128 S=8192 full | 495 | 441 |  |  | 450 |  |  | 1.10 |" in text
    tables = [x.splitlines() for x in text.split("\n\n") if x.startswith("|")]
    assert len(tables) == 5  # targets, a, forward, backward, d
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_the_command_needs_torch_and_triton_only():
    done = subprocess.run(
        [sys.executable, "-c", BARE, "--only", "z"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 2
    assert "--only: there is no section z" in done.stderr
