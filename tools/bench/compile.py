"""Time the compilation of a small GPT by backend="cp" and by backend="inductor".

Each figure is the median of fresh processes, of the first forward and backward less
those of the second, in processor seconds of the process and of g++: other programs on
the machine change them less than they change the time on the clock. Cold is with an
empty cache, warm a second start with what the cold one left. Before that a process
compiles one addition, so that imports and Inductor's look at the compiler count for
neither backend. backend="cp" compiles for rank 0 of 8 on a fake process group, which
runs the graph without communication, in layout zigzag; once as it is by default, with
blocks that repeat compiled once, and once with each compiled ("separate"). Results go
to docs/results/bench_compile.*.
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
from torch._dynamo.utils import compilation_time_metrics  # private
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from cpcompile import config
from cpcompile.reporting.graph_report import recording
from tools.bench.progress import Event, collect
from tools.gpt import BYTES, GPT
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

RANKS = 8
WIDTH, HEADS, TOKENS = 64, 4, 256
BACKENDS = ("inductor", "cp", "separate")
PHASES = ("Dynamo", "passes", "joint graph", "its passes", "partitioner")
PHASES += ("Inductor", "g++", "rest", "total")
Seconds = dict[str, float]


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
    """Yield a row per number of layers and backend; the backends take turns."""
    for count in layers:
        runs: dict[str, list[tuple[Seconds, Seconds]]] = {x: [] for x in BACKENDS}
        for _ in range(reps):
            for name in BACKENDS:
                yield "step", f"{name}, {count} layers"
                runs[name].append(cold_and_warm(name, count))
        for name in BACKENDS:
            cold, warm = (
                {key: statistics.median(run[key] for run in each) for key in each[0]}
                for each in zip(*runs[name], strict=True)
            )
            row = {"layers": count, "backend": name, "cold": cold, "warm": warm}
            yield "rows", row


def cold_and_warm(backend: str, layers: int) -> tuple[Seconds, Seconds]:
    """Return the seconds of two starts, the first of them with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        starts = [in_fresh_process(backend, layers, cache) for _ in range(2)]
    return starts[0], starts[1]


def in_fresh_process(backend: str, layers: int, cache: str) -> Seconds:
    """Return the seconds of one compilation with what lies in a folder of caches."""
    command = [sys.executable, "-m", "tools.bench", "compile"]
    command += ["--child", backend, "--layers", str(layers)]
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
    seconds: Seconds = json.loads(done.stdout.splitlines()[-1])
    return seconds


def compile_once(backend: str, layers: int) -> Seconds:
    """Compile; return processor seconds in all, and seconds of each of PHASES."""
    torch.compile(torch.add, backend="inductor")(torch.ones(8), 1)
    torch.manual_seed(0)
    model = GPT(WIDTH, HEADS, layers, TOKENS)
    tokens = torch.randint(BYTES, (1, TOKENS))
    options = None
    if backend != "inductor":
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
        options = {"mesh": mesh, "shard": {"tokens": 1}, "layout": "zigzag"}
        config.fold_repeated_blocks = backend != "separate"
    name = "inductor" if backend == "inductor" else "cp"
    compiled = torch.compile(model, backend=name, options=options)
    compilation_time_metrics.clear()
    with recording() as reports:
        children, start = child_seconds(), processor_seconds()
        compiled(tokens).backward()
        first, gxx = processor_seconds() - start, child_seconds() - children
    start = processor_seconds()
    compiled(tokens).backward()
    total = first - (processor_seconds() - start)
    passes = sum(run.seconds for report in reports for run in report.passes)
    assert (name == "cp") == (len(reports) == 1), f"{backend}: {len(reports)} graphs"
    folds = any(report.folded for report in reports)
    assert folds == (backend == "cp"), f"{backend}: blocks are folded: {folds}"
    return phases(total, passes, gxx)


def phases(total: float, passes: float, gxx: float) -> Seconds:
    """Return seconds by PHASES: torch's clocks, and what they leave of `total`."""

    def clock(*names: str) -> float:
        return sum(sum(compilation_time_metrics.get(name, ())) for name in names)

    found = {
        "Dynamo": clock("bytecode_tracing", "build_guards"),
        "passes": passes,
        "joint graph": clock("aot_collect_metadata", "aot_trace_joint_graph"),
        "its passes": clock("_recursive_joint_graph_passes"),
        "partitioner": clock("min_cut_rematerialization_partition"),
        # One thread: it waits for each g++.
        "Inductor": max(clock("fx_codegen_and_compile") - clock("compile_file"), 0.0),
        "g++": gxx,
    }
    return found | {"rest": total - sum(found.values()), "total": total}


def child_seconds() -> float:
    """Return the processor seconds of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its ended children."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + child_seconds()


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    rows = {(row["layers"], row["backend"]): row for row in record["rows"]}
    counts = list(dict.fromkeys(count for count, _ in rows))
    lines = [
        "# Compile time of a small GPT",
        "",
        f"{about['model']}; {setup_text(about)}. Median processor seconds, forward and "
        f"backward, of fresh processes and of g++, {about['reps']} per figure; cold "
        "with empty caches, warm in a second start. cp compiles for "
        f"{about['ranks']} ranks on a fake group; separate is cp with each block "
        "compiled by itself. Printed by `tools/in_venv python -m tools.bench compile`.",
        "",
    ]
    lines += [*totals(counts, rows), "", "## Cold, by phase", ""]
    lines += [
        "passes are those of this package, the joint graph is AOTAutograd's trace of "
        "forward and backward. All but g++ and the total are on the clock.",
        "",
    ]
    head = ["layers", "backend", *PHASES]
    table = [
        [count, name, *(f"{row['cold'][phase]:.1f}" for phase in PHASES)]
        for (count, name), row in rows.items()
    ]
    return "\n".join([*lines, *markdown_table(head, table), ""])


def totals(counts: list[int], rows: dict[tuple[int, str], Any]) -> Iterator[str]:
    """Yield seconds of each backend, and ratios to the cold start of Inductor."""
    head = ["layers"]
    head += [f"{name}, {when}" for name in BACKENDS for when in ("cold", "warm")]
    head += ["cp / inductor", "separate / inductor"]
    head += ["cold / warm of cp", "of separate"]
    table = []
    for count in counts:
        cold, warm = (
            {name: rows[count, name][when]["total"] for name in BACKENDS}
            for when in ("cold", "warm")
        )
        pairs = [f"{each[name]:.1f}" for name in BACKENDS for each in (cold, warm)]
        ratios = [cold[name] / cold["inductor"] for name in ("cp", "separate")]
        ratios += [cold[name] / warm[name] for name in ("cp", "separate")]
        table.append([count, *pairs, *(f"{x:.2f}" for x in ratios)])
    yield from markdown_table(head, table)
    if len(counts) > 1:
        first, last = (rows[x, "cp"]["cold"]["total"] for x in (counts[0], counts[-1]))
        yield ""
        yield (
            f"From {counts[0]} to {counts[-1]} layers cp takes {last / first:.2f} "
            "times as long."
        )
