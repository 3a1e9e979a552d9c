"""Measure what the comparison of ranks costs in a training step of the demo's model.

The same model is compiled without it, with the default, and with a comparison
of all values in every call. Their steps take turns, so that what else the machine does
meets all of them. Two figures:

- the ratio of each step to the one without the check beside it (median, quartiles);
- the check's own part of a step: what passes in it outside of the model, as processor
  time of rank 0, and as time that includes waiting for other ranks, which the first
  message of the step would do instead.

The default is measured after its first calls, in which it compares all values, too.
Results go to docs/results/bench_rank_check.*.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from cpcompile.backend import cp
from cpcompile.frontend.rank_consistency.rank_check import FIRST_CALLS, RankCheck
from cpcompile.ranks.meetings import Meetings
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.gpt import BYTES, GPT
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

RULES: dict[str, Any] = {"off": 0, "default": "auto", "every call": 1}
RANKS = 2
MODEL = {"width": 128, "heads": 4, "layers": 4, "context": 2048}  # as in the demo


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    about = setup(ranks=RANKS, rounds=given.rounds, inner=given.inner)
    record: dict[str, Any] = {"setup": about, "rounds": []}
    collect(record, rounds_of(given.rounds, given.inner), given.rounds)
    print(write_report(given.out, "bench_rank_check", record, markdown))


def rounds_of(rounds: int, inner: str) -> Iterator[Event]:
    """Yield seconds of a step of each kind, round by round, on ranks of their own."""
    yield from in_processes(RANKS, measure, rounds, inner)


def measure(put: Callable[[Event], None], rounds: int, inner: str) -> None:
    """Measure on every rank; rank 0 puts the seconds of each round by kind."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = GPT(**MODEL)
    options: dict[str, Any] = {"mesh": mesh, "shard": {"tokens": 1}, "inner": inner}
    # A backend of its own for each, or Dynamo would take the first program for all.
    steps = {
        name: torch.compile(model, backend=functools.partial(cp, options=options))
        for name in RULES
    }
    with own_part() as own:
        for number in range(FIRST_CALLS + 1 + rounds):
            tokens = torch.randint(BYTES, (1, MODEL["context"]))
            seconds: dict[str, dict[str, float]] = {}
            for name, step in steps.items():
                own.update(processor=0.0, wall=0.0)
                dist.barrier()
                start, began = time.perf_counter(), time.thread_time()
                with config.patch(check_ranks=RULES[name]):
                    step(tokens).backward()
                whole, busy = time.perf_counter() - start, time.thread_time() - began
                model.zero_grad()
                seconds[name] = {"whole": whole, "busy": busy, **own}
            if number > FIRST_CALLS:
                put(("step", f"round {number - FIRST_CALLS}"))
                put(("rounds", seconds))


class own_part:
    """Sums up what passes in the check outside of the model, in its `seconds`."""

    def __enter__(self) -> dict[str, float]:
        self.seconds = {"processor": 0.0, "wall": 0.0}
        check, meet = RankCheck.__call__, Meetings.meet

        def called(it: RankCheck, program: Callable[[], Any], args: Any) -> Any:
            start = self._now()

            def paused() -> Sequence[Any]:
                self._add(start)
                results: Sequence[Any] = program()
                start[:] = self._now()
                return results

            self._nested = True
            results = check(it, paused, args)
            self._nested = False
            self._add(start)
            return results

        def met(it: Meetings, *args: Any) -> list[str]:
            start = self._now()
            details = meet(it, *args)
            if not self._nested:  # the backward's
                self._add(start)
            return details

        self._nested = False
        self._patches = contextlib.ExitStack()
        for owner, name, function in (
            (RankCheck, "__call__", called),
            (Meetings, "meet", met),
        ):
            patch = mock.patch.object(owner, name, function)
            self._patches.enter_context(patch)
        return self.seconds

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    def _now(self) -> list[float]:
        return [time.thread_time(), time.perf_counter()]

    def _add(self, start: list[float]) -> None:
        processor, wall = self._now()
        self.seconds["processor"] += processor - start[0]
        self.seconds["wall"] += wall - start[1]


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about, rounds = record["setup"], record["rounds"]
    sizes = ", ".join(f"{name} {size}" for name, size in MODEL.items())
    rows = []
    for name in RULES:
        ratios = [each[name]["whole"] / each["off"]["whole"] for each in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        part = {
            key: statistics.median(each[name][key] for each in rounds)
            for key in ("whole", "busy", "processor", "wall")
        }
        rows.append(
            [
                name,
                f"{1e3 * part['whole']:.1f}",
                f"{middle:.3f} ({low:.3f} to {high:.3f})",
                f"{1e3 * part['processor']:.2f}",
                f"{part['processor'] / part['busy']:.2%}",
                f"{1e3 * part['wall']:.2f}",
            ]
        )
    head = ["check_ranks", "ms per step", "to off, median (quartiles)"]
    head += ["own processor ms", "of the step's processor time", "own ms with waiting"]
    lines = [
        "# What the comparison of ranks costs",
        "",
        f"Training steps of the demo's model ({sizes}) on {about['ranks']} CPU ranks, "
        f"one thread each, {about['inner']}; {setup_text(about)}; {about['rounds']} "
        "steps of each kind in turns. Printed by `tools/in_venv python -m tools.bench "
        "rank_check`.",
        "",
        *markdown_table(head, rows),
    ]
    return "\n".join([*lines, ""])
