"""Measure what cp.shard_parameters saves of memory, and what it costs in time.

A 6-layer GPT is trained with replicated parameters, with sharded ones, and with sharded
ones that are kept from the forward to the backward. Memory is that of the local parts
of parameters, gradients and AdamW's state on rank 0, after a step. Steps (forward,
backward and AdamW) of the three take turns, so that what else the machine does meets
all of them.
Results go to docs/results/bench_sharded_parameters.*.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import cpcompile as cp
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.gpt import BYTES, GPT
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

MODEL = {"width": 256, "heads": 4, "layers": 6, "context": 1024}
KINDS: dict[str, dict[str, Any] | None] = {
    "replicated": None,
    "sharded": {},
    "sharded, kept": {"reshard_after_forward": False},
}
WARM_UP = 3  # steps, the first of which compiles


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind")
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    about = setup(rounds=given.rounds, inner=given.inner)
    record: dict[str, Any] = {"setup": about, "runs": []}
    for ranks in map(int, given.ranks.split(",")):
        found: dict[str, Any] = {"rounds": [], "bytes": []}
        events = in_processes(ranks, measure, ranks, given.rounds, given.inner)
        collect(found, events, given.rounds)
        record["runs"].append({"ranks": ranks, **found})
    print(write_report(given.out, "bench_sharded_parameters", record, markdown))


def measure(put: Callable[[Event], None], ranks: int, rounds: int, inner: str) -> None:
    """Measure on every rank; rank 0 puts bytes, and seconds of each round, by kind."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    steps, sizes = {}, {}
    for kind, sharding in KINDS.items():
        torch.manual_seed(0)
        model = GPT(**MODEL)
        if sharding is not None:
            cp.shard_parameters(model, mesh, **sharding)
        steps[kind] = new_step(model, {"mesh": mesh, "inner": inner})
        sizes[kind] = steps[kind]()
        put(("step", f"{ranks} ranks, {kind}: compiled"))
    put(("bytes", sizes))
    for number in range(WARM_UP - 1 + rounds):
        seconds = {}
        for kind, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[kind] = time.perf_counter() - start
        if number >= WARM_UP - 1:
            put(("step", f"round {number}"))
            put(("rounds", seconds))


def new_step(model: torch.nn.Module, options: dict[str, Any]) -> Callable[[], int]:
    """Make a training step that returns parameter, gradient and AdamW state bytes."""
    compiled = torch.compile(model, backend="cp", options=options)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> int:
        tokens = torch.randint(BYTES, (1, MODEL["context"]))
        dist.broadcast(tokens, 0)
        compiled(tokens).backward()
        optimizer.step()
        held = [x for p in model.parameters() for x in (p, p.grad)]
        held += [x for state in optimizer.state.values() for x in state.values()]
        size = sum(map(local_bytes, held))
        optimizer.zero_grad()
        return size

    return step


def local_bytes(x: torch.Tensor | None) -> int:
    if x is None:
        return 0
    local = x.to_local() if isinstance(x, DTensor) else x
    return local.numel() * local.element_size()


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    sizes = ", ".join(f"{name} {size}" for name, size in MODEL.items())
    rows = []
    for run in record["runs"]:
        (held,) = run["bytes"]
        for kind in KINDS:
            ratios = [each[kind] / each["replicated"] for each in run["rounds"]]
            low, middle, high = statistics.quantiles(ratios, n=4)
            step = statistics.median(each[kind] for each in run["rounds"])
            rows.append(
                [
                    str(run["ranks"]),
                    kind,
                    f"{held[kind] / 2**20:.1f}",
                    f"{held[kind] / held['replicated']:.3f}",
                    f"{1e3 * step:.0f}",
                    f"{middle:.3f} ({low:.3f} to {high:.3f})",
                ]
            )
    head = ["ranks", "parameters", "MiB per rank", "to replicated", "ms per step"]
    head += ["to replicated, median (quartiles)"]
    lines = [
        "# Parameters sharded in the graph",
        "",
        f"Training steps (AdamW) of a GPT ({sizes}) on CPU ranks, one thread each, "
        f"{about['inner']}; {setup_text(about)}; {about['rounds']} steps of each kind "
        "in turns. Memory: parameters, gradients and AdamW's state. Printed by "
        "`tools/in_venv python -m tools.bench sharded_parameters`.",
        "",
        *markdown_table(head, rows),
    ]
    return "\n".join([*lines, ""])
