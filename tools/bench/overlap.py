"""Measure from traces how much of what ranks send is hidden behind computation.

Two ranks of one thread, each in a network namespace of its own, whose link has a rate
that makes messages last. Training steps, compiled by Inductor, are recorded by
torch.profiler. A message is exposed while a rank waits for it; how long it takes is its
bytes over the rate. Needs root, ip and tc. Results go to docs/results/bench_overlap.*.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler_util import FunctionEvent
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile.ops.comm.communication import SPAN
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from tools.bench.namespaces import joined_namespaces, why_no_namespaces
from tools.bench.progress import Event as Progress
from tools.bench.progress import collect
from tools.bench.ranks import in_processes
from tools.gpt import BYTES, GPT
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

RANKS = 2
FLOAT_BYTES = 4
TARGET = 0.15  # of the time that the messages of a ring take
WARM_UP = 2
WAITS = ("cp::ring_wait", "_c10d_functional::wait_tensor")
TENSORS = 2  # of a message of a ring: keys and values, or their gradients
WIDTH, HEADS = 256, 4


@dataclass(frozen=True)
class Case:
    """A model, and which messages of it are measured."""

    name: str
    strategy: str
    layers: int
    tokens: int
    sharded: bool = False
    ring: bool = False


CASES = (
    Case("keys and values of rings", "ring", 2, 8192, ring=True),
    Case("gradients, replicated parameters", "ulysses", 6, 2048),
    Case("sharded parameters and their gradients", "ulysses", 6, 2048, sharded=True),
)


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=7, help="recorded of each case")
    parser.add_argument("--megabits", type=int, default=1000, help="rate of the link")
    parser.add_argument("--buckets", type=float, help="MB, instead of the default")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    if (problem := why_no_namespaces()) is not None:
        raise SystemExit(f"no network namespaces: {problem}")
    about = setup(
        steps=given.steps,
        megabits=given.megabits,
        buckets=given.buckets,
        inner=given.inner,
    )
    record: dict[str, Any] = {"setup": about, "runs": []}
    for case in CASES:
        found: dict[str, Any] = {"steps": []}
        options = (case, given.steps, given.buckets, given.inner)
        with joined_namespaces(given.megabits) as ends:
            events = in_processes(RANKS, measure, *options, ends=ends)
            collect(found, events, given.steps + WARM_UP)
        record["runs"].append({"case": asdict(case), **found})
    print(write_report(given.out, "bench_overlap", record, markdown))


def measure(
    put: Callable[[Progress], None],
    case: Case,
    steps: int,
    buckets: float | None,
    inner: str,
) -> None:
    """Measure on every rank; rank 0 puts seconds and waits of each step."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = GPT(WIDTH, HEADS, case.layers, case.tokens)
    if case.sharded:
        cp.shard_parameters(model, mesh)
    options = {"mesh": mesh, "strategy": case.strategy, "inner": inner}
    compiled = torch.compile(model, backend="cp", options=options)
    tokens = torch.randint(BYTES, (1, case.tokens))
    dist.broadcast(tokens, 0)
    with cp.config.patch(gradient_bucket_megabytes=buckets):
        for number in range(WARM_UP + steps):
            dist.barrier()
            with torch.profiler.profile(acc_events=True) as profile:
                start = time.perf_counter()
                compiled(tokens).backward()
                seconds = time.perf_counter() - start
            put(("step", f"{case.name}, step {number}"))
            if number >= WARM_UP:
                put(("steps", slowest(seconds, *waited(profile.events(), case.ring))))


def waited(events: Iterable[FunctionEvent], ring: bool) -> tuple[float, float]:
    """Return seconds of waits for messages that something hides, and for others.

    Inductor waits by torch's own operator, which does not say for what: messages of
    rings arrive in the order in which they leave.
    """
    events = sorted(events, key=lambda x: x.time_range.start)
    waits = [x for x in events if x.name in WAITS and not _within(x, WAITS[0])]
    named = [x for x in waits if x.name == WAITS[0]]
    left, hidden, bare = named or waits, 0.0, 0.0
    for shift in (x for x in events if x.name == "cp::ring_shift"):
        own = [x for x in left if x.time_range.start >= shift.time_range.end][:TENSORS]
        left = [x for x in left if x not in own]
        seconds = sum(x.time_range.elapsed_us() for x in own) / 1e6
        (message,) = (
            x.name for x in events if x.name.startswith(SPAN) and _in(x, shift)
        )
        if NOTHING_TO_HIDE_IT in message:
            bare += seconds
        else:
            hidden += seconds
    if ring:
        return hidden, bare
    every = sum(x.time_range.elapsed_us() for x in waits) / 1e6
    return every - hidden - bare, 0.0


def _within(event: FunctionEvent, name: str) -> bool:
    parent = event.cpu_parent
    return parent is not None and (parent.name == name or _within(parent, name))


def _in(event: FunctionEvent, outer: FunctionEvent) -> bool:
    inner, around = event.time_range, outer.time_range
    return around.start <= inner.start and inner.end <= around.end


def slowest(*values: float) -> list[float]:
    """Return the largest of all ranks of each value."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(x) for x in found]


def sent_bytes(case: Case) -> tuple[int, int]:
    """Return the bytes that a rank sends in a step: hidden, and the last of each ring.

    gloo adds up in a ring, and makes a reduce-scatter of an all-reduce: each sends a
    tensor 2 (N - 1) / N times; a gather sends (N - 1) / N of it.
    """
    if case.ring:
        message = 2 * case.tokens // RANKS * WIDTH * FLOAT_BYTES
        hops = RANKS - 1  # of keys and values, forward and backward, and of dk and dv
        return 3 * hops * message * case.layers, message * case.layers
    model = GPT(WIDTH, HEADS, case.layers, case.tokens)
    size = FLOAT_BYTES * sum(x.numel() for x in model.parameters())
    share = (RANKS - 1) / RANKS
    return int(size * share * (2 + 2 * case.sharded)), 0


def verdict(share: float) -> str:
    return "met" if share <= TARGET else f"missed by {share - TARGET:.1%}"


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    rate = about["megabits"] * 1e6 / 8
    rows = []
    for run in record["runs"]:
        case = Case(**run["case"])
        seconds, waits, bare = (
            statistics.median(values) for values in zip(*run["steps"], strict=True)
        )
        hidden, last = sent_bytes(case)
        share = waits / (hidden / rate)
        rows.append(
            [
                case.name,
                f"{case.layers} layers, {case.tokens:,} tokens, {case.strategy}",
                f"{1e3 * seconds:.0f}",
                f"{hidden / 1e6:.1f}",
                f"{1e3 * hidden / rate:.0f}",
                f"{1e3 * waits:.0f}",
                f"{share:.1%}",
                verdict(share) if case.ring else "",
                f"{1e3 * bare:.0f} of {1e3 * last / rate:.0f}" if last else "",
            ]
        )
    head = ["messages", "GPT", "ms per step", "MB sent", "ms they take", "ms waited"]
    head += ["exposed", f"target for rings {TARGET:.0%}", "ms waited behind no step"]
    buckets = "by default" if about["buckets"] is None else f"{about['buckets']} MB"
    lines = [
        "# What is hidden behind computation",
        "",
        f"Training steps of a GPT (width {WIDTH}, {HEADS} heads, float32) on two CPU "
        f"ranks of one thread in network namespaces, {about['megabits']} Mbit/s "
        f"between them, {about['inner']}, buckets {buckets}; {setup_text(about)}. "
        f"Medians of {about['steps']} steps of the slowest rank, from traces. "
        "What messages take is their bytes over the rate of the link; exposed is the "
        "part of it that a rank waited, for the other rank too. The last gradients of "
        "keys and values of a ring have no step behind which they could travel. "
        "Printed by `tools/in_venv python -m tools.bench overlap`.",
        "",
        *markdown_table(head, rows),
    ]
    return "\n".join([*lines, ""])
