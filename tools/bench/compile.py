"""Times the compilation of a small GPT by backend="cp" and by backend="inductor".

Each figure is the median of fresh processes, each with an empty cache, of the first
forward and backward less those of the second, in processor seconds of the process and
of g++: other programs on the machine change them less than they change the time on the
clock. Before that a process compiles one addition, so that imports and Inductor's look
at the compiler count for neither backend. backend="cp" compiles for rank 0 of 8 on a
fake process group, which runs the graph without communication, in layout zigzag; once
block by block, and once with blocks that repeat compiled once ("folded"). Results go to
docs/results/bench_compile.*.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile.reporting.report import recording
from tools.bench.progress import Event, collect
from tools.gpt import BYTES, GPT
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

RANKS = 8
WIDTH, HEADS, TOKENS = 64, 4, 256
BACKENDS = ("inductor", "cp", "folded")


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--reps", type=int, default=2, help="fresh processes each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    parser.add_argument("--child", choices=BACKENDS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if min(*given.layers, given.reps, 1) < 1:
        parser.error("--layers and --reps: needed 1 or more")
    if given.child is not None:
        print(json.dumps(compile_once(given.child, given.layers[0])))
        return
    about = setup(
        model=f"width {WIDTH}, {HEADS} heads, {TOKENS} tokens, float32",
        ranks=RANKS,
        reps=given.reps,
    )
    record: dict[str, Any] = {"setup": about, "rows": []}
    steps = len(given.layers) * given.reps * len(BACKENDS)
    collect(record, measure(given.layers, given.reps), steps)
    print(write_report(given.out, "bench_compile", record, markdown))


def measure(layers: list[int], reps: int) -> Iterator[Event]:
    """A row of median seconds per number of layers; the backends take turns."""
    for count in layers:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in BACKENDS}
        for _ in range(reps):
            for name in BACKENDS:
                yield "step", f"{name}, {count} layers"
                runs[name].append(in_fresh_process(name, count))
        inductor, cp, folded = (
            statistics.median(run["total"] for run in runs[name]) for name in BACKENDS
        )
        passes = statistics.median(run["passes"] for run in runs["cp"])
        relayout = statistics.median(run["relayout"] for run in runs["cp"])
        yield (
            "rows",
            {
                "layers": count,
                "inductor_s": inductor,
                "cp_s": cp,
                "folded_s": folded,
                "passes_s": passes,
                "relayout_s": relayout,
                "relayout_ms_per_layer": 1e3 * relayout / count,
                "cp_over_inductor": cp / inductor,
                "folded_over_inductor": folded / inductor,
                "passes_over_inductor": passes / inductor,
            },
        )


def in_fresh_process(backend: str, layers: int) -> dict[str, float]:
    """Seconds of one compilation with empty caches."""
    command = [sys.executable, "-m", "tools.bench", "compile"]
    command += ["--child", backend, "--layers", str(layers)]
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else g++ is no child of ours
        }
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE)
    if done.returncode:
        raise SystemExit(
            f"{backend} with {layers} layers ended with exit code {done.returncode}; "
            "see above"
        )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def compile_once(backend: str, layers: int) -> dict[str, float]:
    """Processor seconds in all, and seconds of cp's passes."""
    torch.compile(torch.add, backend="inductor")(torch.ones(8), 1)
    torch.manual_seed(0)
    model = GPT(WIDTH, HEADS, layers, TOKENS)
    tokens = torch.randint(BYTES, (1, TOKENS))
    options = None
    if backend != "inductor":
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        options = {"mesh": mesh, "shard": {"tokens": 1}, "layout": "zigzag"}
        options["repeat"] = "auto" if backend == "folded" else False
    name = "inductor" if backend == "inductor" else "cp"
    compiled = torch.compile(model, backend=name, options=options)
    with recording() as reports:
        start = processor_seconds()
        compiled(tokens).backward()
        first = processor_seconds() - start
    start = processor_seconds()
    compiled(tokens).backward()
    second = processor_seconds() - start
    runs = [run for report in reports for run in report.passes]
    passes = sum(run.seconds for run in runs)
    relayout = sum(run.seconds for run in runs if run.name == "lay_out_tokens")
    assert (name == "cp") == (len(reports) == 1), f"{backend}: {len(reports)} graphs"
    folds = any(report.folded for report in reports)
    assert folds == (backend == "folded"), f"{backend}: blocks are folded: {folds}"
    return {"total": first - second, "passes": passes, "relayout": relayout}


def processor_seconds() -> float:
    """Of this process, and of its children that have ended."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = map(resource.getrusage, who)
    return sum(each.ru_utime + each.ru_stime for each in used)


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    setup = record["setup"]
    lines = [
        "# Compile time of a small GPT",
        "",
        f"{setup['model']}; {setup_text(setup)}. Median processor seconds, "
        "forward and backward, of fresh processes with empty caches and of g++, "
        f"{setup['reps']} per figure. cp compiles for {setup['ranks']} ranks on a fake "
        "group; folded is cp with blocks that repeat compiled once. passes are the "
        "seconds that cp spends in the passes of this package, relayouts those of "
        "lay_out_tokens. Printed by "
        "`tools/in_venv python -m tools.bench compile`.",
        "",
    ]
    head = ["layers", "inductor", "cp", "folded", "passes", "relayouts", "per layer"]
    head += ["cp / inductor", "folded / inductor", "passes / inductor"]
    rows = [
        [
            row["layers"],
            *(f"{row[name]:.1f}" for name in ("inductor_s", "cp_s", "folded_s")),
            *(f"{row[name]:.2f}" for name in ("passes_s", "relayout_s")),
            f"{row['relayout_ms_per_layer']:.1f} ms",
            f"{row['cp_over_inductor']:.2f}",
            f"{row['folded_over_inductor']:.2f}",
            f"{row['passes_over_inductor']:.0%}",
        ]
        for row in record["rows"]
    ]
    return "\n".join([*lines, *markdown_table(head, rows), ""])
