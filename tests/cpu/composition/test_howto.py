"""The training script of docs/howto, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs/howto/train_fsdp2_cp.py"
STEPS = 3


def trained(ranks: int, *options: str) -> dict[int, tuple[float, ...]]:
    """(loss, norm) of each step that ran."""
    launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    common = ["--inner=aot_eager", "--dtype=float64", "--tokens=33", f"--steps={STEPS}"]
    done = subprocess.run(
        [sys.executable, "-m", *launch, str(SCRIPT), *common, *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"step (\d+): loss (\S+), norm (\S+)", done.stdout)
    return {int(step): (float(loss), float(norm)) for step, loss, norm in lines}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_and_resuming_on_other_numbers_of_ranks(tmp_path) -> None:
    """float64; what is printed has 12 digits, AdamW may amplify what is behind them."""
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
        for step, values in trained(ranks, *options).items():
            assert values == pytest.approx(alone[step], rel=1e-9), (ranks, step)
