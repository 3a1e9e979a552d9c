"""Calibrate, predict and time all strategies x shapes on CPU ranks, and give regrets.

Regret is the time of the strategy that the model chooses over that of the best one,
minus 1. Ranks are gloo processes of one thread: on loopback, and one each in two
network namespaces whose link is limited by `tc tbf`, where the best strategy changes.
Results go to --out, if given, as bench_strategies.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench.namespaces import joined_namespaces, why_no_namespaces
from tools.bench.strategies.report import markdown, print_tables
from tools.results import setup, write_report

SHAPE = "B=1, H=8, float32, forward and backward, contiguous layout, eager"
# (tokens, key/value heads, head dim, causal)
SHAPES = [
    *((n, 8, 64, True) for n in (512, 1024, 2048)),
    *((n, 1, 64, False) for n in (512, 1024, 2048)),
    *((n, 2, 128, True) for n in (512, 1024)),
    *((n, 8, 128, False) for n in (512, 1024)),
    *((n, 2, 64, False) for n in (512, 1024)),
    *((n, 1, 128, True) for n in (512, 1024)),
    (4096, 8, 64, True),
    (4096, 2, 64, True),
    (8192, 1, 64, True),
]
# Both sides of every crossover come first: a slow link leaves no time for the last.
NETWORK_SHAPES = [
    (tokens, kv_heads, 64, causal)
    for tokens in (512, 1024, 2048)
    for kv_heads, causal in ((8, True), (1, True), (1, False))
]
QUICK_SHAPES = [(256, 8, 64, True), (512, 1, 64, False)]
MEGABITS = (100, 1000, 10000)
# Seconds after which a section starts no further shape: ten minutes for all of them.
LOOPBACK_BUDGET, NETWORK_BUDGET = 120.0, 75.0
SECTION_TIMEOUT_SECONDS = 400.0


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--megabits", type=int, nargs="*", default=list(MEGABITS))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each shape")
    parser.add_argument("--quick", action="store_true", help="two shapes, one rate")
    parser.add_argument("--out", type=Path, help="folder, such as docs/results")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {"setup": setup(shape=SHAPE), "sections": []}
    effort, shapes, seconds = "full", SHAPES, options.seconds
    network_effort, network_shapes, megabits = "links", NETWORK_SHAPES, options.megabits
    if options.quick:
        effort = network_effort = "quick"
        shapes, network_shapes, seconds = QUICK_SHAPES, QUICK_SHAPES, 0.1
        megabits = megabits[:1]
    sections = [(f"{n} ranks on loopback", n, None) for n in options.ranks]
    problem = why_no_namespaces() if megabits else None
    if problem is not None:
        print(f"no network namespaces: {problem}", file=sys.stderr)
        record["setup"]["no_network"] = problem
        megabits = []
    sections += [(f"2 namespaces, {rate} Mbit/s", 2, rate) for rate in megabits]
    for name, ranks, rate in sections:
        what = (effort, shapes) if rate is None else (network_effort, network_shapes)
        record["sections"].append(run_section(name, ranks, *what, seconds, rate))
        if options.out is not None:  # what there is, if a later section fails
            write_report(options.out, "bench_strategies", record, markdown)
    print_tables(record)


def run_section(
    name: str,
    ranks: int,
    effort: str,
    shapes: list[tuple[int, int, int, bool]],
    seconds: float,
    megabits: int | None = None,
) -> dict[str, Any]:
    """Start the ranks and wait for what the first one writes.

    Raises: SystemExit if a rank fails or takes too long; all are ended then.
    """
    print(f"== {name}", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = folder / "result.json"
        ends = None
        if megabits is not None:
            ends = stack.enter_context(joined_namespaces(megabits))
        address = "127.0.0.1" if ends is None else ends[0].address
        command = [sys.executable, "-m", "tools.bench.strategies.rank"]
        command += ["--ranks", str(ranks), "--init", f"tcp://{address}:{_free_port()}"]
        command += ["--effort", effort, "--shapes", json.dumps(shapes)]
        command += ["--seconds", str(seconds), "--result", str(result)]
        budget = LOOPBACK_BUDGET if megabits is None else NETWORK_BUDGET
        command += ["--budget", str(budget)]
        processes = []
        for rank in range(ranks):
            environment = dict(os.environ)
            of_rank = [*command, "--rank", str(rank)]
            if ends is not None:
                of_rank = ends[rank].inside(of_rank)
                environment["GLOO_SOCKET_IFNAME"] = ends[rank].interface
            processes.append(subprocess.Popen(of_rank, env=environment))
            stack.callback(_end, processes[-1])
        try:
            codes = [p.wait(SECTION_TIMEOUT_SECONDS) for p in processes]
        except subprocess.TimeoutExpired as error:
            raise SystemExit(f"{name}: not done after {error.timeout:.0f} s") from error
        if any(codes):
            raise SystemExit(f"{name}: ranks ended with the exit codes {codes}")
        found: dict[str, Any] = json.loads(result.read_text())
    return {"name": name, "ranks": ranks, "megabits": megabits, **found}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
