"""The command: `python -m tests.fuzz --minutes 10`; see README.md beside it."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.draw import OUTER, Wishes, draw
from tests.fuzz.judge import Judge, Outcome
from tests.fuzz.minimise import minimise
from tests.fuzz.program import Program
from tests.fuzz.render import render
from tests.fuzz.report import Tally, write_failure


def main(arguments: list[str] | None = None) -> int:
    """Run until programs or minutes are over; 1 if something is wrong."""
    given = _parser().parse_args(arguments)
    _settle_environment()
    kinds = tuple(given.kinds)
    wishes = Wishes(tuple(given.world), given.inductor, given.dtype, kinds)
    judge = Judge(given.accounts)
    try:
        if given.replay is not None:
            return _replay(judge, given, wishes)
        return _run(judge, given, wishes)
    finally:
        judge.renew()


def _run(judge: Judge, given: argparse.Namespace, wishes: Wishes) -> int:
    end = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    tally, start = Tally(), time.monotonic()
    try:
        for number in itertools.count():
            if number == given.programs or (end and time.monotonic() > end):
                break
            seed = given.seed + number
            program = draw(seed, wishes)
            outcome = judge.judge(program)
            new = tally.add(program, outcome)
            text = f"seed {seed}: {outcome.verdict.value} {outcome.reason}".rstrip()
            print(f"{text} [{program.setting}; {outcome.seconds:.1f} s]", flush=True)
            if outcome.verdict.ours and new:
                _look_closer(judge, program, outcome, given)
    except KeyboardInterrupt:
        print("stopped")
    minutes = (time.monotonic() - start) / 60
    print(f"\n{tally.table()}\n{minutes:.1f} minutes")
    return 1 if tally.faults else 0


def _look_closer(
    judge: Judge, program: Program, outcome: Outcome, given: argparse.Namespace
) -> Outcome:
    """Once more on fresh processes, then smaller; write both."""
    judge.renew()
    again = judge.judge(program, patience=2.0)
    out, seed = Path(given.out), program.seed
    if not again.like(outcome):
        print(
            f"  on fresh processes it is {again.verdict.value} {again.reason}: "
            "the cause lies in what ran before, or in time"
        )
    path = write_failure(out, seed, program, outcome, "whole")
    print(f"  {path}", flush=True)
    if not again.verdict.ours or not given.minimise:
        return again

    def fails(smaller: Program) -> bool:
        return judge.judge(smaller).like(again)

    small = minimise(program, fails, given.minimise)
    path = write_failure(out, seed, small, again, "small")
    print(f"  {path}\n{_indented(render(small))}\n{_indented(again.details)}")
    return again


def _replay(judge: Judge, given: argparse.Namespace, wishes: Wishes) -> int:
    program = draw(given.replay, wishes)
    print(render(program))
    outcome = judge.judge(program)
    print(f"seed {given.replay}: {outcome.verdict.value} {outcome.reason}")
    print(outcome.details)
    if outcome.verdict.ours:
        _look_closer(judge, program, outcome, given)
    return 1 if outcome.verdict.ours else 0


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _settle_environment() -> None:
    """What the ranks inherit: one thread each, and a cache of their own."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    cache = Path(tempfile.gettempdir()) / f"cpcompile_fuzz_{os.getuid()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def _worlds(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, help="stop after so many minutes")
    add("--programs", type=int, help="stop after so many programs")
    add("--seed", type=int, default=0, help="the seed of the first program")
    add("--world", type=_worlds, default=[2, 3], help="numbers of ranks, as 2,3")
    add("--inductor", type=float, default=0.25, help="share compiled by Inductor")
    add("--dtype", choices=["float64", "float32"], default="float64")
    add("--kinds", nargs="*", default=[], choices=[*OUTER], help="one in each program")
    add("--accounts", action="store_true", help="count messages, too")
    add("--replay", type=int, help="only the program of this seed; also its source")
    add("--minimise", type=float, default=240.0, help="seconds per failure; 0: not")
    add("--out", default="fuzz_failures", help="the folder of failing programs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
