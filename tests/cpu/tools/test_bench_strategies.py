"""`tools.bench` strategies and peers: mechanics and tables; timings vary."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.namespaces import why_no_namespaces
from tools.bench.peers.attentions import NAIVE, ONE_PROCESS, OURS
from tools.bench.peers.bench import Case, time_peers
from tools.bench.peers.documents import Mask
from tools.bench.ranks import in_processes
from tools.bench.strategies.report import summary
from tools.results import ROOT

SECTION = {
    "name": "2 ranks on loopback",
    "left_out": [],
    "about": {"other_processes": "used 1% of the cores meanwhile (median)"},
    "rows": [
        {
            "tokens": tokens,
            "kv_heads": 8,
            "head_dim": 64,
            "causal": True,
            "measured": {"ring": ring, "ulysses": 0.02},
            "predicted": {"ring": predicted, "ulysses": 0.02},
            "chosen": "ring" if predicted < 0.02 else "ulysses",
            "best": "ring" if ring < 0.02 else "ulysses",
            "regret": regret,
            "other_processes": 0.01,
        }
        for tokens, ring, predicted, regret in (
            (512, 0.01, 0.01, 0.0),
            (1024, 0.0204, 0.018, 0.02),
            (2048, 0.03, 0.019, 0.5),
        )
    ],
}


def test_summary() -> None:
    """1024 tokens count on neither side: the two are equally fast there."""
    lines = summary(SECTION)
    assert lines[0] == "regret: mean 17.3% (misses 5%), worst 50.0% (misses 15%)"
    assert lines[-1] == (
        "ring against ulysses: each is clearly faster at some shapes; predicted on the "
        "right side at 1 of 2"
    )


def namespaces() -> set[str]:
    if shutil.which("ip") is None:
        return set()
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    return {line.split()[0] for line in listed.splitlines() if "cpbench" in line}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("network", [False, True])
def test_quick(tmp_path: Path, network: bool) -> None:
    if network and (reason := why_no_namespaces()) is not None:
        pytest.skip(reason)
    where = ["--ranks", "--megabits", "1000"] if network else ["--ranks", "4"]
    rest = [] if network else ["--megabits"]
    command = [sys.executable, "-m", "tools.bench", "strategies"]
    before = namespaces()
    done = subprocess.run(
        [*command, "--quick", *where, *rest, "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=450,
    )
    assert done.returncode == 0, done.stderr
    (section,) = json.loads((tmp_path / "bench_strategies.json").read_text())[
        "sections"
    ]
    assert section["profile"]["ranks_per_node"] == section["ranks"]
    expected = {"ring", "all_gather", "ulysses"}
    if not network:
        expected |= {"hybrid 2 in 2 (ring)", "hybrid 2 (ring) in 2"}
    for row in section["rows"]:
        assert set(row["measured"]) == expected
        assert row["best"] == min(row["measured"], key=row["measured"].get)
        assert row["regret"] >= 0
    assert len(section["rows"]) == 2
    assert "| tokens | heads |" in (tmp_path / "bench_strategies.md").read_text()
    assert namespaces() <= before


@pytest.mark.parametrize(("dtype", "mask"), [("float32", Mask.PACKED)])
def test_peers_are_right_and_take_turns(dtype: str, mask: Mask) -> None:
    """Each is compared with exact results first; others say why they are left out."""
    case = Case(dtype, mask, tokens=256, reps=1)
    events = list(in_processes(2, time_peers, [case]))
    timed = {x["peer"] for kind, x in events if kind == "times"}
    assert timed >= {*OURS, NAIVE, ONE_PROCESS}
    (chosen,) = [x["peer"] for kind, x in events if kind == "chosen"]
    assert chosen in OURS
    reasons = {x["peer"]: x["reason"] for kind, x in events if kind == "left_out"}
    assert "takes no mask" in reasons["torch_ring_balanced"]
    assert not timed & set(reasons)
