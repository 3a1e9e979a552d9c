"""Measure what an exchange of heads in groups saves of memory, beside its prediction.

One layer of causal attention, and its projections, by Ulysses on 2 CPU ranks, compiled
by Inductor. Each case runs in fresh processes. Memory is the growth of the resident set
of rank 0 in a step; blocks of 1 MiB or more go back to the system when they are freed.
Results go to docs/results/bench_head_groups.*.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile import config
from cpcompile.cost.plans import Candidate, Strategy
from cpcompile.reporting.graph_report import recording
from tools.bench.progress import Event
from tools.bench.ranks import in_processes
from tools.bench.resident import give_back_freed_blocks, peak, reset_peak
from tools.results import (
    RESULTS,
    busy_note,
    markdown_table,
    note_load,
    setup,
    setup_text,
    write_report,
)

RANKS, WIDTH, HEADS, HEAD_DIM = 2, 256, 16, 64
KEY_HEADS = (16, 4)
DIRECTIONS = ("both", "forward")


class Attention(nn.Module):
    """Causal attention of `HEADS` heads on `kv_heads` of keys."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, kv_heads * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        found: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return found


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    record: dict[str, Any] = {"setup": setup(tokens=given.tokens), "runs": []}
    for kv_heads in KEY_HEADS:
        for direction in DIRECTIONS:
            for form in forms(kv_heads, given.tokens, direction):
                print(kv_heads, direction, form.label, flush=True)
                case = (kv_heads, given.tokens, direction, form.peak_extra_bytes)
                events = in_processes(RANKS, measure, *case)
                (run,) = [x for kind, x in events if kind == "found"]
                about = {"kv_heads": kv_heads, "direction": direction}
                record["runs"].append({**about, **run})
                note_load(record["setup"])
                name = "bench_head_groups"
                report = write_report(given.out, name, record, markdown)
    print(report)


def forms(kv_heads: int, tokens: int, direction: str) -> Iterator[Candidate]:
    """Yield Ulysses with all heads at once, then in ever more groups."""
    budget = None
    while True:
        try:
            plan = cp.plan(
                batch=1,
                heads=HEADS,
                kv_heads=kv_heads,
                head_dim=HEAD_DIM,
                seq=tokens,
                ranks=RANKS,
                dtype="float32",
                direction=direction,
                hardware="cpu",
                memory_budget=budget,
            )
        except ValueError:  # no strategy takes so little
            return
        (form,) = (c for c in plan.candidates if c.strategy is Strategy.ULYSSES)
        if form.excluded is not None:
            return
        yield form
        budget = float((form.peak_extra_bytes or 0) - 1)


def measure(
    put: Callable[[Event], None],
    kv_heads: int,
    tokens: int,
    direction: str,
    budget: int,
) -> None:
    """Measure on every rank; rank 0 puts bytes and seconds."""
    give_back_freed_blocks()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model, x = Attention(kv_heads), torch.randn(1, tokens, WIDTH)
    options = {"mesh": mesh, "strategy": "ulysses"}
    compiled = torch.compile(model, backend="cp", options=options)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        if direction == "both":
            compiled(x).square().mean().backward()
        else:
            with torch.no_grad():
                compiled(x)
        put(("step", ""))  # whoever waits has a limit for one step
        return time.perf_counter() - start

    with config.patch(memory_budget=budget, hardware="cpu"):
        with recording() as reports:
            step()
        growth, seconds = [], []
        for _ in range(3):
            model.zero_grad()
            before = reset_peak()
            seconds.append(step())
            growth.append(peak() - before)
    plans = [call.plan for report in reports for call in report.calls]
    chosen = next(plan.chosen for plan in plans if plan is not None)
    found = {
        "label": chosen.label,
        "groups": chosen.head_groups,
        "predicted": chosen.peak_extra_bytes,
        "growth": max(growth),
        "seconds": min(seconds),
    }
    put(("found", found))


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about, rows = record["setup"], []
    for run in record["runs"]:
        first = next(
            x
            for x in record["runs"]
            if (x["kv_heads"], x["direction"]) == (run["kv_heads"], run["direction"])
        )
        rows.append(
            [
                str(run["kv_heads"]),
                run["direction"],
                str(run["groups"]),
                f"{run['predicted'] / 2**20:.0f}",
                f"{run['predicted'] / first['predicted']:.2f}",
                f"{run['growth'] / 2**20:.0f}",
                f"{run['growth'] / first['growth']:.2f}",
                f"{run['seconds']:.2f}",
            ]
        )
    head = ["key heads", "direction", "groups", "predicted, MiB", "to the first"]
    head += ["measured, MiB", "to the first", "s per step"]
    lines = [
        "# Heads that are exchanged in groups",
        "",
        f"One layer of causal attention of {HEADS} heads of {HEAD_DIM} dims to "
        f"{about['tokens']:,} tokens, float32, by Ulysses on {RANKS} CPU ranks, one "
        f"thread each, inductor; {setup_text(about)}. Predicted: what the cost model "
        "says that attention takes beside q, k, v and the output of a rank. Measured: "
        "growth of rank 0 in a step, with these, over what is there before it. "
        "Printed by `tools/in_venv python -m tools.bench head_groups`.",
        "",
        *markdown_table(head, rows),
        "",
        *busy_note(about),
    ]
    return "\n".join([*lines, ""])
