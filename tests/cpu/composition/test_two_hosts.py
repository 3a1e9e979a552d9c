"""torchrun on two hosts: network namespaces, each with an address of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.namespaces import (
    Namespace,
    joined_namespaces,
    why_no_namespaces,
)

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "docs/howto/train_fsdp2_cp.py"
TRAINING = ["--dtype=float64", "--tokens=33", "--steps=2", "--inner=aot_eager"]
MEGABITS = 1000


def start(launch: list[str], options: list[str], **interface: str) -> subprocess.Popen:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    python = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launch[:4], *torchrun, *launch[4:], str(SCRIPT), *TRAINING, *options]
    return subprocess.Popen(
        command,
        env=os.environ | python | interface,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(text: str) -> list[float]:
    """Loss and norm of each step."""
    found = re.findall(r"step \d+: loss (\S+), norm (\S+)", text)
    return [float(x) for pair in found for x in pair]


def launch(end: Namespace, node: int, first: Namespace, rendezvous: str) -> list[str]:
    at = f"{first.address}:29511"
    options = {
        "static": [
            f"--node-rank={node}",
            f"--master-addr={first.address}",
            "--master-port=29511",
        ],
        "c10d": [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={at}",
            "--rdzv-id=cp",
            f"--local-addr={end.address}",
            # A namespace has addresses of its own, and the name of the machine.
            f"--rdzv-conf=is_host={int(node == 0)}",
        ],
    }
    return end.inside(["--nnodes=2", "--nproc-per-node=2", *options[rendezvous]])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("axes", [("--dp=2", "--cp=2"), ("--cp=4",)], ids=["2x2", "4"])
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_training_on_two_hosts(rendezvous: str, axes: tuple[str, ...]) -> None:
    """float64; what is printed has 12 digits, AdamW may amplify what follows them."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    alone = start([], ["--dp=1"])
    wanted = steps(alone.communicate(timeout=240)[0])
    assert len(wanted) == 4
    with joined_namespaces(MEGABITS) as ends:
        hosts = [
            start(
                launch(end, node, ends[0], rendezvous),
                list(axes),
                GLOO_SOCKET_IFNAME=end.interface,
            )
            for node, end in enumerate(ends)
        ]
        try:
            outputs = [host.communicate(timeout=240) for host in hosts]
        finally:
            for host in hosts:
                host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    got = [x for out, _ in outputs for x in steps(out)]
    assert got == pytest.approx(wanted, rel=1e-9)
