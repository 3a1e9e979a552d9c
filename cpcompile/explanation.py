"""`cp.explain`: what a compiled call does with each of its attention calls, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cpcompile import config
from cpcompile.plan import Candidate, Plan
from cpcompile.report import CallReport, GraphReport, recording

_HEADER = (
    *("attention", "q", "k/v", "mask", "strategy", "kernel", "ms", "exposed"),
    "runner-up",
)


@dataclass(frozen=True)
class Explanation:
    """The graphs that one call ran, in order; print it for a table."""

    graphs: tuple[GraphReport, ...]

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """Every attention call of every graph."""
        return tuple(call for graph in self.graphs for call in graph.calls)

    def __str__(self) -> str:
        if not self.graphs:
            return 'no graph compiled by backend="cp" ran in this call'
        blocks = []
        for graph in self.graphs:
            blocks.append(graph.summary())
            if graph.calls:
                blocks.append(_table([_HEADER, *(_row(call) for call in graph.calls)]))
            blocks += [f"  {note}" for note in _notes(graph)]
        return "\n".join(blocks)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` once and explain the compiled graphs that it ran.

    Args:
        fn: a function or module compiled with backend="cp"; compiled now if it was not.
        args, kwargs: the call's arguments. All ranks must call explain together.

    Returns: an Explanation: per attention call its module path, shapes, mask, strategy,
    the kernel of its steps, predicted milliseconds, communication that nothing hides,
    and the alternatives. Predictions are those of the hardware profile that is named
    below the table.
    """
    with recording() as reports:
        fn(*args, **kwargs)
    return Explanation(tuple(reports))


def _row(call: CallReport) -> tuple[str, ...]:
    shapes = (
        call.path,
        f"{list(call.query)} {call.dtype}",
        f"{call.key[1] if len(call.key) == 4 else 1} heads x {call.key[-2]}",
        call.mask,
    )
    if call.plan is None:
        return (*shapes, "not rewritten", "", "", "", call.reason or "")
    chosen = call.plan.chosen
    name = chosen.strategy.value + (" (forced)" if call.plan.forced else "")
    return (
        *shapes,
        name,
        call.kernel or "",
        _milliseconds(chosen.seconds),
        _milliseconds(chosen.exposed_seconds),
        _runner_up(call.plan),
    )


def _runner_up(plan: Plan) -> str:
    other, best = plan.runner_up, plan.chosen.seconds
    if other is None or other.seconds is None or not best:
        return "none"
    gap = other.seconds / best - 1
    tie = " (tie)" if abs(gap) <= config.tie_fraction else ""
    return f"{other.strategy.value} {100 * gap:+.0f} %{tie}"


def _notes(graph: GraphReport) -> list[str]:
    plans = [call.plan for call in graph.calls if call.plan is not None]
    notes = [
        f"predicted for {name}, layout {layout}"
        for name, layout in sorted({(p.hardware, p.layout) for p in plans})
    ]
    out = {_exclusion(c) for p in plans for c in p.candidates if c.excluded is not None}
    notes += sorted(out)
    notes += [f"gathered output: {text}" for text in graph.gathered]
    return notes


def _exclusion(candidate: Candidate) -> str:
    return f"{candidate.strategy.value} is out: {candidate.excluded}"


def _milliseconds(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:.3f}"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
