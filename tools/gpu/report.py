"""Correctness and speed of the step kernels on one GPU, in one call of a few minutes.

    export PYTHONPATH=.
    python -m tools.gpu                  all of it, into docs/results/gpu_report.*
    python -m tools.gpu --out FOLDER     into another folder
    python -m tools.gpu --only e,c       some sections: a to f, in their own order
    python -m tools.gpu --quick          the most important items only
    python -m tools.gpu --smoke          tiny sizes on the CPU (TRITON_INTERPRET=1)

Needs torch and triton, nothing of ours installed. Sections run in the order of
SECTIONS; each has its share of the time that is left, takes its most important items
first, and is written as soon as it ends. The report names what was not run.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from tools.gpu import binaries, configs, correctness, inductor, rates, ring
from tools.gpu.sections import Mode, Row, Section, run_section
from tools.gpu.tables import markdown, targets_table
from tools.results import RESULTS, setup, write_report

COMMAND = "python -m tools.gpu"
BUDGET_SECONDS = 500.0
KEEP_SECONDS = 10.0  # between two writes of a section that runs
WORKERS = max(1, min(12, (os.cpu_count() or 2) - 2))
# One process compiles alone, or each of them would start a pool of its own.
ALONE = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}

SECTIONS = (
    Section(
        "a",
        "Correctness against float64",
        90,
        WORKERS,
        correctness.plan,
    ),
    # Before the sections that time, which find their kernels compiled.
    Section("e", "Binaries and memory", 90, WORKERS, binaries.plan, ALONE),
    Section("b", "TFLOP/s beside other kernels", 110, 1, rates.plan, ALONE),
    Section("d", "Simulated rings", 60, 1, ring.plan),
    Section("c", "Candidate configs", 30, 1, configs.plan),
    Section("f", "Through Inductor", 90, 1, inductor.plan),
)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="a,b,c,d,e,f", help="sections, by letter")
    parser.add_argument("--quick", action="store_true", help="the first items only")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_SECONDS, help="seconds for everything"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    only = set(options.only.split(","))
    if unknown := only - {section.key for section in SECTIONS}:
        parser.error(f"--only: there is no section {', '.join(sorted(unknown))}")
    if not options.smoke and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --smoke runs tiny sizes on the CPU")
    # Else Inductor names a folder of its own to processes that it is used in.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    mode = Mode("cpu" if options.smoke else "cuda", options.smoke, options.quick)
    record = report(only, mode, options.budget, options.out)
    print("\n".join(targets_table(record)))
    print(f"{options.out / 'gpu_report.md'} after {record['setup']['seconds']:.0f} s")


def report(only: set[str], mode: Mode, budget: float, out: Path) -> dict[str, Any]:
    """Run the sections in `only`; what there is lies in `out` at any time."""
    start = time.monotonic()
    wanted = [section for section in SECTIONS if section.key in only]
    record: dict[str, Any] = {"setup": about(mode, budget), "sections": {}}
    for section in wanted:
        record["sections"][section.key] = {
            "title": section.title,
            "seconds": None,
            "rows": [],
            "not_run": [str(item) for item in section.plan(mode)],
            "why_not_run": "the report ended before",
        }
    write(record, out, start)
    while wanted:
        left = budget - (time.monotonic() - start)
        share = wanted[0].seconds / sum(section.seconds for section in wanted)
        section = wanted.pop(0)
        entry = record["sections"][section.key]
        _run(
            section,
            mode,
            max(left * share, 0.0),
            entry,
            lambda: write(record, out, start),
        )
        write(record, out, start)
    return record


def _run(
    section: Section,
    mode: Mode,
    seconds: float,
    entry: dict[str, Any],
    keep: Callable[[], None],
) -> None:
    """Fill the entry of a section; `keep` is called from time to time."""
    print(f"{section.key}. {section.title}: at most {seconds:.0f} s", flush=True)
    begin = kept = time.monotonic()
    rows: list[Row] = entry["rows"]

    def take(row: Row) -> None:
        nonlocal kept
        rows.append(row)
        if row["item"] in entry["not_run"]:
            entry["not_run"].remove(row["item"])
        if "error" in row:
            last = str(row["error"]).strip().splitlines()[-1]
            print(f"   {row['item']}: {last[:200]}", flush=True)
        if time.monotonic() - kept > KEEP_SECONDS:
            keep()
            kept = time.monotonic()

    entry["not_run"] = run_section(section, mode, seconds, take)
    entry["seconds"] = time.monotonic() - begin
    late = entry["seconds"] >= seconds
    entry["why_not_run"] = (
        f"its {seconds:.0f} s were over" if late else "its processes kept ending"
    )
    print(
        f"   {len(rows)} rows, {len(entry['not_run'])} items not run, "
        f"{entry['seconds']:.0f} s",
        flush=True,
    )


def write(record: dict[str, Any], out: Path, start: float) -> None:
    """Write both files; each is a whole one at any time."""
    record["setup"]["seconds"] = time.monotonic() - start
    write_report(out, "gpu_report", record, markdown)


def about(mode: Mode, budget: float) -> dict[str, Any]:
    """Return the set-up, with what only a GPU has, and the command."""
    on_gpu = mode.device == "cuda"
    return setup(
        device=torch.cuda.get_device_name() if on_gpu else platform.machine(),
        driver=nvidia_smi("driver_version") if on_gpu else "none",
        power_limit=nvidia_smi("power.limit") if on_gpu else "none",
        triton=triton.__version__,
        cuda=str(torch.version.cuda),
        cudnn=str(torch.backends.cudnn.version()) if on_gpu else "none",
        command=" ".join([COMMAND, *sys.argv[1:]]),
        budget_seconds=budget,
    )


def nvidia_smi(what: str) -> str:
    """Return a property of the first GPU, or why there is none."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else "unknown"
