"""Time whole training steps on CPU ranks, against one process and other packages.

Forward, backward and AdamW, float32, of a GPT and of a Llama of transformers with
random weights. All ways take turns within one run; a figure is the median of its
rounds, a time is that of the slowest rank. The first steps compile, and their losses
are compared with those of one process: a way that cannot take part is listed with the
reason. Other packages are optional: peers/packages.py says how to install them. Then
one step of each rank is recorded, and its time is shared out. Results go to
docs/results/bench_step.*.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.peers.packages import versions
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.bench.resident import (
    give_back_freed_blocks,
    keep_freed_blocks,
    peak,
    reset_peak,
)
from tools.bench.step.models import MODELS, Inputs, new_inputs, new_model
from tools.bench.step.report import markdown
from tools.bench.step.shares import mean, recorded, shares
from tools.bench.step.ways import Training, Way, all_ways
from tools.results import RESULTS, setup, write_report

RANKS = 2
CHECKED_STEPS = 2  # the first one compiles
LOSS_ERROR = 1e-3  # relative; ranks average their means, which weigh labels unequally
SHARED_OUT = ("one thread", "all threads", "cp")


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each way")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    about = setup(
        tokens=given.seq, rounds=given.rounds, ranks=RANKS, packages=versions()
    )
    record: dict[str, Any] = {"setup": about, "models": []}
    for name in given.model:
        found: dict[str, Any] = {"rounds": [], "about": [], "left_out": []}
        events = in_processes(RANKS, measure, name, given.seq, given.rounds)
        collect(found, events, len(all_ways(RANKS)) + given.rounds)
        record["models"].append({"model": name, **found})
        report = write_report(given.out, "bench_step", record, markdown)
    print(report)


def measure(put: Callable[[Event], None], name: str, tokens: int, rounds: int) -> None:
    """Measure on every rank; the first one puts what is found."""
    give_back_freed_blocks()
    inputs = new_inputs(name, tokens)
    trainings = take_part(put, name, inputs)
    growth = {x.way.name: memory(x, inputs) for x in trainings}
    keep_freed_blocks()
    for number in range(1, rounds + 1):
        put(("step", f"{name}: round {number} of {rounds}"))
        put(("rounds", {x.way.name: timed(x, inputs) for x in trainings}))
    for training in trainings:
        way = training.way
        held = sum(x.numel() * x.element_size() for x in training.parameters)
        about = {"way": way.name, "growth": growth[way.name], "parameters": held}
        about["processes"] = 1 if way.alone else dist.get_world_size()
        about["threads"] = way.threads
        if way.name in SHARED_OUT:
            about["shares"] = shared_out(training, inputs)
        put(("about", about))


def take_part(
    put: Callable[[Event], None], name: str, inputs: Inputs
) -> list[Training]:
    """Return the trainings whose first losses are those of the first way.

    Why the others are left out is put.
    """
    trainings: list[Training] = []
    expected: list[float] = []
    for way in all_ways(dist.get_world_size()):
        put(("step", f"{name}: {way.name} compiles"))
        made, losses, reason = first_steps(way, name, inputs)
        if reason is None:
            expected = expected or losses
            reason = difference(losses, expected)
        if reason is None and made is not None:
            trainings.append(made)
        else:
            put(("left_out", {"way": way.name, "reason": reason}))
    return trainings


def first_steps(
    way: Way, name: str, inputs: Inputs
) -> tuple[Training | None, list[float], str | None]:
    """Return the training, its first losses, and in one line why there are none.

    Whatever another package raises is such a reason; one process and this package have
    to work. Ranks tell each other after each step, so that none waits for one that
    failed.
    """
    made, losses = None, []
    for _ in range(CHECKED_STEPS):
        loss, reason = None, None
        try:
            made = made or Training(way, new_model(name, inputs["tokens"].shape[1]))
            loss = on_its_ranks(made, lambda made=made: made.step(inputs))
        except Exception as error:
            if way.name in SHARED_OUT:
                raise
            first = " ".join(str(error).split()).partition(". ")[0]
            reason = f"{type(error).__name__}: {first}"
        found = gathered((loss, reason))
        reasons = [x for _, x in found if x is not None]
        if reasons:
            return None, [], reasons[0]
        known = [x for x, _ in found if x is not None]  # of the first rank, or of all
        losses.append(sum(known) / len(known))
    return made, losses, None


def difference(losses: list[float], expected: list[float]) -> str | None:
    """Say in words how the losses differ; None if they do not."""
    pairs = list(zip(losses, expected, strict=True))
    if all(abs(x - y) <= LOSS_ERROR * abs(y) for x, y in pairs):
        return None
    found, needed = (", ".join(f"{x:.4f}" for x in each) for each in (losses, expected))
    return f"wrong losses: {found}, of one process {needed}"


def on_its_ranks(training: Training, call: Callable[[], Any]) -> Any:
    """Call with the way's threads; return None where the way does not run."""
    if training.way.alone and dist.get_rank() > 0:
        return None
    torch.set_num_threads(training.way.threads)
    try:
        return call()
    finally:
        torch.set_num_threads(1)


def memory(training: Training, inputs: Inputs) -> int:
    """Return the bytes by which the largest rank grows in a step."""

    def growth() -> int:
        before = reset_peak()
        training.step(inputs)
        return peak() - before

    return max(x or 0 for x in gathered(on_its_ranks(training, growth)))


def timed(training: Training, inputs: Inputs) -> dict[str, Any]:
    """Return the seconds of a step, and processor seconds of each rank that runs it.

    main: those of the main thread.
    """
    dist.barrier()
    start, used, main = time.perf_counter(), time.process_time(), time.thread_time()
    on_its_ranks(training, lambda: training.step(inputs))
    used, main = time.process_time() - used, time.thread_time() - main
    dist.barrier()
    seconds = time.perf_counter() - start
    each = gathered((used, main))[: 1 if training.way.alone else None]
    return {
        "seconds": seconds,
        "processor": [x for x, _ in each],
        "main": [x for _, x in each],
    }


def shared_out(training: Training, inputs: Inputs) -> dict[str, float]:
    """Return the seconds of one step by what they are for, the mean of the ranks."""

    def mine() -> dict[str, float]:
        return shares(recorded(lambda: training.step(inputs)))

    dist.barrier()
    found = gathered(on_its_ranks(training, mine))
    return mean(x for x in found if x is not None)


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
