"""Clocks of all ranks that run one call, and what each of them does when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
import numpy.typing as npt
import sympy  # type: ignore[import-untyped]  # sympy ships no type information

from cpcompile.cost.hardware.profile import HardwareProfile
from cpcompile.cost.plans import Candidate, Workload
from cpcompile.cost.symbols import SYMBOLS, numbers

Clock = npt.NDArray[np.float64]
# Of a kernel: rows, dense pairs and pairs in triangles, see kernel_seconds.
KERNEL = sympy.symbols("rows dense triangular", positive=True)


class Activity(Enum):
    """What a rank does at a time: it computes, or waits for a message or a rank."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"  # waits for a message that is on its way
    IDLE = "idle"  # waits for a rank that has not sent yet


@dataclass(frozen=True)
class TimeSpan:
    """One activity of a rank; `start` is in seconds since the start of the call."""

    activity: Activity
    start: float
    seconds: float
    what: str


@dataclass(frozen=True)
class Row:
    """One rank, or one position of the ring if `rank` stands for several.

    spans: activities without gaps. messages: messages that arrive here, also while the
        rank computes.
    """

    rank: int
    spans: tuple[TimeSpan, ...]
    messages: tuple[TimeSpan, ...]


@dataclass(frozen=True)
class Timeline:
    """One call under one candidate.

    positions: the number of all rows; `rows` has some of them, from first to last.
    ranks_per_row: the number of ranks that do the same at the same time.
    """

    candidate: Candidate
    positions: int
    ranks_per_row: int
    rows: tuple[Row, ...]
    seconds: float


class SimulatedRun:
    """Clocks of all positions, and the spans of those that are shown."""

    def __init__(
        self,
        candidate: Candidate,
        workload: Workload,
        profile: HardwareProfile,
        rows: int,
    ) -> None:
        self.candidate, self.workload = candidate, workload
        self.positions, self.name = candidate.degrees.ring, ""
        given = (candidate.degrees, profile, candidate.head_groups)
        values = numbers(workload, *given)
        self._values = [values[symbol] for symbol in SYMBOLS]
        self.now: Clock = np.zeros(self.positions)
        shown = np.linspace(0, self.positions - 1, min(rows, self.positions)).round()
        self.shown = [int(i) for i in shown]
        self._spans: dict[int, list[TimeSpan]] = {i: [] for i in self.shown}
        self._messages: dict[int, list[TimeSpan]] = {i: [] for i in self.shown}

    def value(self, expression: sympy.Expr, *kernel: float) -> float:
        """Evaluate an expression; `kernel`: rows, dense and triangular pairs."""
        function = _compiled(expression, bool(kernel))
        return float(function(*self._values, *kernel))

    def advance(self, activity: Activity, until: Clock, what: str) -> None:
        """Let every position do `activity` until its time in `until`."""
        for i in self.shown:
            start, end = float(self.now[i]), float(until[i])
            if end > start:
                text = f"{self.name}: {what}"
                self._spans[i].append(TimeSpan(activity, start, end - start, text))
        self.now = np.maximum(self.now, until)

    def compute(self, seconds: float | Clock, what: str) -> None:
        self.advance(Activity.COMPUTE, self.now + seconds, what)

    def communicate(self, seconds: float, what: str) -> None:
        self.message(self.now, seconds, what)
        self.advance(Activity.COMMUNICATION, self.now + seconds, what)

    def message(self, begin: Clock, seconds: float, what: str) -> None:
        """Note a message that is on its way, whatever the rank does."""
        for i in self.shown:
            if seconds > 0:
                span = TimeSpan(Activity.COMMUNICATION, float(begin[i]), seconds, what)
                self._messages[i].append(span)

    def meet(self) -> None:
        """Let all positions wait for the slowest."""
        until = np.full(self.positions, self.now.max())
        self.advance(Activity.IDLE, until, "waits for the slowest rank")

    def result(self) -> Timeline:
        rows = [
            Row(i, tuple(self._spans[i]), tuple(self._messages[i])) for i in self.shown
        ]
        per_row = self.candidate.degrees.ulysses
        end = float(self.now.max())
        return Timeline(self.candidate, self.positions, per_row, tuple(rows), end)


@cache
def _compiled(expression: sympy.Expr, kernel: bool) -> Callable[..., float]:
    arguments = (*SYMBOLS, *KERNEL) if kernel else SYMBOLS
    function: Callable[..., float]
    function = sympy.lambdify(arguments, expression, "math")
    return function
