"""The verdict on a program: run on all ranks, and, if something failed, without us."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from enum import Enum

from tests.cpu.workers import Pool, ProcessFailedError, ProcessTimeoutError
from tests.fuzz.on_rank import (
    Raised,
    RankRun,
    run_on_rank,
    run_without_cp,
)
from tests.fuzz.program import Program, Setting
from tests.fuzz.render import render

# It is a hang if for so many seconds no rank computes: a busy machine is none. Inductor
# waits for compilers, whose time counts when they are done.
IDLE = {"aot_eager": 40.0, "inductor": 120.0}
# Seconds for a program, compilation included, and for the other ranks after a failure.
TIMEOUT = {"aot_eager": 600.0, "inductor": 1200.0}
GRACE = 20.0
# After so many programs processes are started anew, so that their memory is bounded.
PROGRAMS_PER_POOL = 150


class Verdict(Enum):
    """How a program ended.

    EQUAL: every result and gradient is that of one process.
    REFUSED: one of our errors says that we cannot, on all ranks alike.
    WRONG, CRASH, HANG: faults of ours.
    TORCH: torch.compile without us, or Dynamo on DTensors before us, fails alike.
    INVALID: one process fails in eager; a fault of the generator.
    """

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"
    TORCH = "torch"
    INVALID = "invalid"

    @property
    def ours(self) -> bool:
        """Whether it is a fault that we have to fix."""
        return self in (Verdict.WRONG, Verdict.CRASH, Verdict.HANG)


@dataclass(frozen=True)
class Outcome:
    """A verdict and why.

    reason: one line that is alike for one cause: names, numbers and paths are left out.
    details: everything there is to know, for the report.
    """

    verdict: Verdict
    reason: str = ""
    details: str = ""
    error: float = 0.0
    calls: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    def like(self, other: Outcome) -> bool:
        """Whether both look like one cause."""
        if self.verdict is not other.verdict:
            return False
        return self.verdict is Verdict.WRONG or self.reason == other.reason


class Judge:
    """Runs programs on sets of processes, which live on while nothing fails."""

    def __init__(self, accounts: bool = False) -> None:
        self.accounts = accounts  # whether messages are counted, too
        self._pools: dict[int, Pool] = {}
        self._runs: dict[int, int] = {}

    def judge(self, program: Program, patience: float = 1.0) -> Outcome:
        """The verdict; `patience` multiplies how long a program may take."""
        source, start = render(program), time.monotonic()
        outcome = self._compiled(source, program, patience)
        if outcome.verdict in (Verdict.WRONG, Verdict.CRASH):
            excuse = self._excuse(source, program)
            if excuse is not None:
                details = f"{excuse.details}\n\nWith cp: {outcome.details}"
                outcome = replace(excuse, details=details)
        setting = program.setting
        if outcome.reason.startswith("RewriteError") and setting.strict:
            outcome = self._without_strict(program, outcome, patience)
        return replace(outcome, seconds=time.monotonic() - start)

    def _without_strict(
        self, program: Program, refused: Outcome, patience: float
    ) -> Outcome:
        """`refused`, if the program runs all the same where nothing has to be shared.

        The rule is: with strict=False whatever torch.compile runs, runs.
        """
        setting = replace(program.setting, strict=False)
        outcome = self.judge(replace(program, setting=setting), patience)
        if not outcome.verdict.ours:
            return refused
        reason = f"strict=False, where strict refuses: {outcome.reason}"
        return replace(outcome, reason=reason)

    def renew(self) -> None:
        """End all processes; the next program gets fresh ones."""
        for pool in self._pools.values():
            pool.close()
        self._pools, self._runs = {}, {}

    def pool(self, world: int) -> Pool:
        """The processes for so many ranks."""
        self._runs[world] = self._runs.get(world, 0) + 1
        if self._runs[world] % PROGRAMS_PER_POOL == 0:
            self._pools.pop(world).close()
        if world not in self._pools:
            self._pools[world] = Pool(world, group_timeout=3600.0)
        return self._pools[world]

    def _compiled(self, source: str, program: Program, patience: float) -> Outcome:
        world, inner = program.setting.world, program.setting.inner
        timeout = TIMEOUT[inner] * patience
        found = self.pool(world).run_until(
            run_on_rank,
            source,
            world,
            self.accounts,
            timeout=timeout,
            last=lambda run: run.raised is not None,
            grace=GRACE,
            idle=IDLE[inner] * patience,
        )
        runs = {k: v for k, v in found.items() if isinstance(v, RankRun)}
        ended = {k: v for k, v in found.items() if isinstance(v, ProcessFailedError)}
        missing = sorted(set(range(world)) - found.keys())
        if ended:
            rank, error = next(iter(ended.items()))
            last = str(error).strip().splitlines()[-1]
            text = f"rank {rank}: {error}"
            return Outcome(Verdict.CRASH, f"process ends: {short(last)}", text)
        alone = [run.alone for run in runs.values() if run.alone is not None]
        if alone:
            return _raised(Verdict.INVALID, alone[0])
        raised = {k: run.raised for k, run in runs.items() if run.raised is not None}
        if raised:
            return _of_raised(raised, missing, program.setting)
        if missing:
            text = f"no answer from ranks {missing}, while no rank computes"
            return Outcome(Verdict.HANG, "no answer", text)
        error, calls = max(run.error for run in runs.values()), runs[0].calls
        wrong = [f"rank {k}: {x}" for k, run in runs.items() for x in run.wrong]
        if wrong:
            text = "\n".join(wrong[:12])
            return Outcome(Verdict.WRONG, short(wrong[0]), text, error, calls)
        return Outcome(Verdict.EQUAL, error=error, calls=calls)

    def _excuse(self, source: str, program: Program) -> Outcome | None:
        """The outcome without us, if that fails too."""
        inner = program.setting.inner
        limit = TIMEOUT[inner]
        try:
            run = self.pool(1).run(run_without_cp, source, inner, timeout=limit)[0]
        except (ProcessFailedError, ProcessTimeoutError) as error:
            return Outcome(
                Verdict.TORCH, short(str(error).splitlines()[-1]), str(error)
            )
        if run.raised is not None:
            return _raised(Verdict.TORCH, run.raised)
        if run.wrong:
            return Outcome(Verdict.TORCH, f"{inner} is wrong", "\n".join(run.wrong))
        return None


def _of_raised(
    raised: dict[int, Raised], missing: list[int], setting: Setting
) -> Outcome:
    first = next(iter(raised.values()))
    alike = len({x.kind for x in raised.values()}) == 1 and len(raised) == setting.world
    unasked = first.kind == "RewriteError" and not setting.strict
    if first.refusal and alike and not unasked:
        return _raised(Verdict.REFUSED, first)
    if setting.door == "dtensor" and all(x.early for x in raised.values()):
        outcome = _raised(Verdict.TORCH, first)
        return replace(outcome, reason=f"Dynamo on DTensors, {outcome.reason}")
    where = "" if alike else f" (on ranks {sorted(raised)} only)"
    where += f" (no answer from {missing})" if missing else ""
    where += " (though not strict)" if first.refusal and unasked else ""
    # a rank that lost its neighbour says so; what the neighbour says is the cause
    causes = [x for x in raised.values() if "Connection closed" not in x.text]
    outcome = _raised(Verdict.CRASH, (causes or [first])[0])
    return Outcome(Verdict.CRASH, outcome.reason + where, outcome.details)


def _raised(verdict: Verdict, raised: Raised) -> Outcome:
    reason = f"{raised.kind}: {short(raised.text)}"
    return Outcome(verdict, reason, f"{raised.kind}: {raised.text}\n{raised.trace}")


_PLACE = re.compile(
    r'\(File "[^"]*", line \d+, in \w+\)|at <?[\w. ]+>?(?= \(File)|/\S*/'
)


def short(text: str) -> str:
    """One line of at most 110 letters, without places, names and numbers."""
    line = next((x for x in text.strip().splitlines() if x.strip()), "")
    line = re.sub(r"\b[tmvuwqk]\d+\b", "x", _PLACE.sub("", line))
    line = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", line)
    return re.sub(r"(#, ?)+#", "#", " ".join(line.split()))[:110]
