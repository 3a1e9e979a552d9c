"""Time a causal ring in every layout: busy time of the ranks, and wall time.

float32, B=1, H=8, D=64. Two ways: gloo ranks of one thread each, which share the cores
of this machine, and ranks of their own, see Note [Ranks of their own] in ring_clock.py.
Layouts take turns in every round; figures are medians of the rounds. Every layout is
first compared with one process on a short sequence. Results go to --out, if given, as
bench_layouts.json and .md.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cpcompile.ops  # noqa: F401  # registers torch.ops.cp
from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.ops.strategies.ring_steps import ring_backward, ring_forward
from tools.bench.layouts.report import markdown, print_tables
from tools.bench.layouts.ring_clock import Alone, busy, replay
from tools.bench.operands import (
    CHECK_TOKENS,
    HEAD_DIM,
    SHAPE,
    assert_close,
    exact,
    make_whole,
)
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.results import setup, write_report

SCALE = HEAD_DIM**-0.5
LAYOUTS = tuple(Layout)


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--seq", type=int, default=8192, help="tokens of the sequence")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--reps", type=int, default=5, help="rounds")
    parser.add_argument("--out", type=Path, help="folder, such as docs/results")
    options = parser.parse_args(arguments)
    if min(options.ranks - 1, options.reps) < 1 or options.seq < 2 * options.ranks:
        parser.error(
            f"got --seq {options.seq}, --ranks {options.ranks}, --reps {options.reps}; "
            "needed 2 ranks, 2 tokens for each and 1 round, or more"
        )
    about = setup(
        shape=SHAPE,
        reps=options.reps,
        ranks=options.ranks,
        tokens=options.seq,
        cores=os.cpu_count(),
    )
    record: dict[str, Any] = {"setup": about, "shared": [], "alone": []}
    events = measure(options.ranks, options.seq, options.reps)
    collect(record, events, 2 * (options.reps + 1))
    if options.out is not None:
        write_report(options.out, "bench_layouts", record, markdown)
    print_tables(record)


def measure(ranks: int, tokens: int, reps: int) -> Iterator[Event]:
    """Yield ("step", description), ("alone", row) and ("shared", row), as they come.

    A row is one layout in one round: seconds of forward and of backward.
    """
    yield from in_processes(1, time_alone, ranks, tokens, reps)
    yield from in_processes(ranks, time_shared, tokens, reps)


def time_shared(put: Any, tokens: int, reps: int) -> None:
    """Time the operators on the ranks of this process group, barrier to barrier."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for layout in LAYOUTS:
        check(layout)
    whole = make_whole(tokens)
    operands = {
        layout: [
            x[:, :, TokenLayout.of(layout, tokens, ranks).positions(rank)]
            for x in whole
        ]
        for layout in LAYOUTS
    }
    for rep in range(reps + 1):  # the first one warms up
        put(("step", f"{ranks} ranks on {os.cpu_count()} cores, round {rep} of {reps}"))
        for layout, local in operands.items():
            walls, own = ring_once(layout, local, tokens)
            seconds = torch.zeros(ranks, 2, dtype=torch.float64)
            seconds[rank] = torch.tensor(own)
            dist.all_reduce(seconds)
            if rep:
                put(("shared", row(layout, walls, seconds.tolist())))


def row(layout: Layout, walls: list[float], busy: list[list[float]]) -> dict[str, Any]:
    """Make a row; `busy` has seconds of forward and of backward for each rank."""
    return {"layout": layout.value, "wall": walls, "busy": busy}


def ring_once(
    layout: Layout, local: list[Tensor], tokens: int
) -> tuple[list[float], list[float]]:
    """Return wall and busy seconds of this rank, of forward and of backward each."""
    *qkv, grad = local
    rest = operator_arguments(layout, tokens)
    dist.barrier()
    times = [time.perf_counter()]
    with busy() as forward:
        saved = torch.ops.cp.ring_attention(*qkv, *rest)
    dist.barrier()
    times.append(time.perf_counter())
    with busy() as backward:
        torch.ops.cp.ring_attention_backward(grad, *qkv, *saved, *rest, False, None)
    dist.barrier()
    times.append(time.perf_counter())
    walls = [times[1] - times[0], times[2] - times[1]]
    return walls, [sum(forward), sum(backward)]


def operator_arguments(layout: Layout, tokens: int) -> tuple[Any, ...]:
    """Return extras, sizes, spec and group of the ring on this process group."""
    return [], [tokens, tokens], str(spec_of(layout)), dist.group.WORLD.group_name


def spec_of(layout: Layout) -> AttentionSpec:
    return AttentionSpec(SCALE, is_causal=True, layout=layout)


def check(layout: Layout) -> None:
    """Assert that the operators compute attention and its gradients in `layout`."""
    positions = TokenLayout.of(layout, CHECK_TOKENS, dist.get_world_size()).positions(
        dist.get_rank()
    )
    whole = make_whole(CHECK_TOKENS)
    *qkv, grad = (x[:, :, positions] for x in whole)
    rest = operator_arguments(layout, CHECK_TOKENS)
    out, lse = torch.ops.cp.ring_attention(*qkv, *rest)
    backward = torch.ops.cp.ring_attention_backward
    found = (out, *backward(grad, *qkv, out, lse, *rest, False, None)[:3])
    assert_close(layout.value, found, [x[:, :, positions] for x in exact(whole)])


def time_alone(put: Any, ranks: int, tokens: int, reps: int) -> None:
    """Run each rank's ring in this process, one after the other; then replay them."""
    whole = make_whole(tokens)
    for rep in range(reps + 1):  # the first one warms up
        put(("step", f"ranks of their own, round {rep} of {reps}"))
        for layout in LAYOUTS:
            found = ring_alone(layout, whole, ranks)
            if rep:
                put(("alone", found))


def ring_alone(layout: Layout, whole: list[Tensor], ranks: int) -> dict[str, Any]:
    """Return one row, whose wall time is what the replay of all ranks gives."""
    length = whole[0].shape[2]
    tokens, runs = TokenLayout.of(layout, length, ranks), Runs.contiguous(length, ranks)
    locals_ = [[x[:, :, tokens.positions(r)] for x in whole] for r in range(ranks)]
    dealt = None if layout is Layout.CONTIGUOUS else tokens
    inputs = AttentionInputs(spec_of(layout))
    rings = [
        [
            Ring(runs, runs, True, "", r, way, dealt, inputs)
            for way in ("forward", "backward")
        ]
        for r in range(ranks)
    ]
    chunks = [
        ring.own_chunk(k, v)
        for (ring, _), (_, k, v, _) in zip(rings, locals_, strict=True)
    ]
    events, seconds = [], []
    for (first, second), (*qkv, grad) in zip(rings, locals_, strict=True):
        with busy() as forward:
            one = Alone(first, chunks)
            saved = one.run(ring_forward, *qkv)
        with busy() as backward:
            other = Alone(second, chunks)
            other.run(ring_backward, grad, *qkv, *saved)
        events.append((one.events, other.events))
        seconds.append([sum(forward), sum(backward)])
    walls = [replay(list(of_ranks)) for of_ranks in zip(*events, strict=True)]
    return row(layout, walls, seconds)
