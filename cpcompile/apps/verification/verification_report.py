"""The report on a model on several ranks: for people, for programs and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from cpcompile.apps.verification.compare import Check
from cpcompile.cost.plans.tables import text_table

_KINDS = {
    "result": "results",
    "loss": "losses",
    "gradient": "gradients",
    "weight": "weights",
    "buffer": "buffers",
}
_MOST_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Difference(Check):
    """The first tensor of a step that differs, by modules.

    what: in words, such as "gradient of the output". path: of the module, "" for the
    model; module: its class. after: what comes right before it, and is right. dtype: in
    which the ranks ran.
    """

    what: str
    path: str
    module: str
    after: str
    dtype: str


@dataclass(frozen=True)
class Report:
    """The answer whether several ranks compute what one process computes.

    checks: all tensors that were compared. first: where the first difference is.
    notes: what else there is to know; advice: what to try, if something differs.
    """

    model: str
    world: int
    options: str
    steps: int
    checks: tuple[Check, ...]
    graphs: tuple[str, ...] = ()
    first: Difference | None = None
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Tell whether every tensor is within its bound on every rank."""
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 if all is right, else 1."""
        return 0 if self.ok else 1

    def wrong(self) -> list[Check]:
        """Return the checks of tensors that are out of bounds, the worst first."""
        return sorted((c for c in self.checks if not c.ok), key=lambda c: -c.share)

    def to_json(self) -> str:
        """Return all of it as JSON; errors that are no number are "nan" or "inf"."""
        return json.dumps(_plain({"ok": self.ok, **asdict(self)}), indent=1)

    def __str__(self) -> str:
        verdict = "equals one process" if self.ok else "DIFFERS from one process"
        where = f"{self.model} on {self.world} ranks"
        lines = [f"{where} {verdict} ({self.options})", "", *_overview(self)]
        if not self.ok:
            lines += ["", *_wrong(self)]
        if self.first is not None:
            lines += ["", *_place(self.first)]
        lines += [""] * bool(self.advice)
        lines += [f"{'    ' if n else 'try:'} {x}" for n, x in enumerate(self.advice)]
        return "\n".join([*lines, "", *self.graphs, *self.notes]).rstrip()


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def _overview(report: Report) -> list[str]:
    header = ("compared", "tensors", "wrong", "largest error", "allowed", "tensor")
    rows: list[tuple[str, ...]] = []
    for kind, words in _KINDS.items():
        checks = [c for c in report.checks if c.kind == kind]
        if checks:
            worst = max(checks, key=lambda c: c.share)
            when = f" after {report.steps} steps" if kind == "weight" else ""
            wrong = sum(not c.ok for c in checks)
            numbers = (str(len(checks)), str(wrong), *_numbers(worst))
            rows.append((words + when, *numbers, worst.name))
    return [text_table([header, *rows])]


def _wrong(report: Report) -> list[str]:
    wrong = report.wrong()
    rows = [(c.kind, c.name, *_numbers(c), str(c.rank), c.problem) for c in wrong]
    header = ("what", "tensor", "error", "allowed", "rank", "")
    lines = ["what differs, the worst first:"]
    lines += [text_table([header, *rows[:_MOST_ROWS]])]
    more = len(rows) - _MOST_ROWS
    return [*lines, f"and {more} more"] if more > 0 else lines


def _numbers(check: Check) -> tuple[str, str]:
    return f"{check.error:.2g}", f"{check.bound:.2g}"


def _place(first: Difference) -> list[str]:
    module = f"module {first.path}" if first.path else "the model"
    error = "{}, allowed {}".format(*_numbers(first))
    lines = [
        f"first difference: the {first.what} of {module} ({first.module})",
        f"  error  {first.problem or error}, on rank {first.rank}, in {first.dtype}",
    ]
    return [*lines, f"  after  {first.after}, which is right"] if first.after else lines
