"""The training scripts of docs/howto, as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUN = Path(__file__).parent / "run_script.py"
STEPS = 3
Steps = dict[int, tuple[float, ...]]  # loss and norm


def steps(script: str, ranks: int, *options: str) -> Steps:
    """(loss, norm) of each step that ran; what is printed has 12 digits."""
    out = run(script, ranks, *options)
    lines = re.findall(r"step (\d+): loss (\S+), norm (\S+)", out)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


def check(got: Steps, alone: Steps) -> None:
    assert got.keys() == alone.keys() and got
    for step, values in got.items():
        assert values == pytest.approx(alone[step], rel=1e-9), step


def run(script: str, ranks: int, *options: str) -> str:
    """What a script of docs/howto prints."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = str(ROOT / "docs/howto" / script)
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(RUN), path, "--inner=aot_eager", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_training_and_resuming_on_other_numbers_of_ranks(tmp_path) -> None:
    """float64; AdamW may amplify what follows the digits that are printed."""

    def trained(ranks: int, *options: str) -> Steps:
        common = ["--dtype=float64", "--tokens=33", f"--steps={STEPS}"]
        return steps("train_fsdp2_cp.py", ranks, *common, *options)

    alone = trained(1)
    assert sorted(alone) == list(range(STEPS))
    path = str(tmp_path / "checkpoint")
    for ranks, options in (
        (4, ("--dp=2", "--cp=2", f"--save={path}")),
        (1, (f"--resume={path}",)),
        (2, ("--cp=2", f"--resume={path}")),
        (3, ("--cp=3", f"--resume={path}")),
        (4, ("--cp=4", f"--resume={path}")),
    ):
        got = trained(ranks, *options)
        check(got, {step: alone[step] for step in got})


@pytest.mark.timeout(1200)
def test_trainer_of_transformers(tmp_path) -> None:
    """float32, of which six digits are printed."""

    def trained(ranks: int, steps: int, folder: str, *options: str) -> list[list[str]]:
        given = [f"--out={tmp_path / folder}", f"--steps={steps}", "--evaluate"]
        text = run("train_hf_trainer.py", ranks, *given, *options)
        lines = [line.split() for line in text.splitlines()]
        return [x[2:] for x in lines if x and x[0] in ("step", "evaluation")]

    alone = trained(1, 4, "alone")
    # Loss and norm of four steps; loss, rows, labels and right ones of two evaluations.
    assert sorted(map(len, alone)) == [2, 2, 2, 2, 4, 4]
    for ranks, options in ((2, ["--cp=2"]), (4, ["--dp=2", "--cp=2"])):
        folder = f"on_{ranks}"
        trained(ranks, 2, folder, *options)
        got = trained(ranks, 4, folder, "--resume", *options)  # and what was logged
        for ours, wanted in zip(got, alone, strict=True):
            assert [*map(float, ours)] == pytest.approx([*map(float, wanted)], rel=1e-5)


@pytest.mark.timeout(600)
def test_tokens_of_transformers() -> None:
    """Two graphs, of the prompt and of a token, and 1/N of the keys on each rank."""

    def generated(ranks: int) -> tuple[list[str], list[str]]:
        out = run("generate_hf.py", ranks).splitlines()
        return [x for x in out if x.startswith("tokens")], out

    alone, _ = generated(1)
    assert len(alone) == 1
    for ranks, part in ((2, 20), (3, 14)):
        tokens, out = generated(ranks)
        assert tokens == alone
        assert f"graphs 2, keys on a rank [1, 2, {part}, 8]" in out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["fabric", "accelerate"])
def test_loops_of_libraries(library: str) -> None:
    """float64; AdamW may amplify what follows the digits that are printed."""
    alone = steps("train_loops.py", 1, library)
    assert len(alone) == 4
    for ranks, options in ((2, ["--cp=2"]), (4, ["--dp=2", "--cp=2"])):
        check(steps("train_loops.py", ranks, library, *options), alone)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_post_training(method: str) -> None:
    """float64; tests/cpu/training/test_post_training.py compares all methods."""
    alone = steps("post_training.py", 1, method)
    assert len(alone) == 3
    check(steps("post_training.py", 4, method, "--dp=2", "--cp=2"), alone)


def test_the_page_about_post_training_quotes_its_scripts() -> None:
    howto = ROOT / "docs/howto"
    scripts = "".join(
        (howto / name).read_text(encoding="utf-8")
        for name in ("post_training.py", "post_training_trl.py")
    )
    page = (howto / "post_training.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert quoted and all(code in scripts for code in quoted)


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="trl is not installed: pip install cpcompile[trainers]",
)
@pytest.mark.parametrize(
    ("script", "method", "ranks", "options"),
    [
        ("train_trl.py", [], 4, ["--dp=2", "--cp=2"]),
        ("post_training_trl.py", ["dpo"], 4, ["--dp=2", "--cp=2"]),
        ("post_training_trl.py", ["grpo"], 2, ["--cp=2"]),
    ],
    ids=["sft", "dpo", "grpo"],
)
def test_trainers_of_trl(
    script: str, method: list[str], ranks: int, options: list[str]
) -> None:
    """float32, of which six digits are printed."""

    def trained(ranks: int, *options: str) -> list[list[float]]:
        out = run(script, ranks, *method, *options)
        lines = re.findall(r"step \d+: (\S+) (\S+)", out)
        return [[float(loss), float(norm)] for loss, norm in lines]

    alone = trained(1)
    assert len(alone) >= 3
    got = trained(ranks, *options)
    for ours, wanted in zip(got, alone, strict=True):
        assert ours == pytest.approx(wanted, rel=1e-5)
