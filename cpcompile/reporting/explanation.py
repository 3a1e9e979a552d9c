"""`cp.explain`: what a compiled call does with each of its attention calls, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpcompile import config
from cpcompile.accounting.graph_account import (
    Account,
    Exchange,
    GraphDirection,
    Purpose,
    grouped,
    total,
)
from cpcompile.cost.plain_data import to_json
from cpcompile.cost.plans import Plan
from cpcompile.cost.plans.tables import degrees_text, milliseconds, text_table
from cpcompile.errors import InputError
from cpcompile.reporting.graph_report import (
    CallReport,
    GraphReport,
    account_of,
    recording,
)
from cpcompile.reporting.plan_facts import candidate_notes
from cpcompile.reporting.ways_out import MEBIBYTE, place_of

_HEADER = (
    *("attention", "q", "k/v", "mask", "layout", "strategy", "ranks", "kernel"),
    *("ms", "exposed", "runner-up", "excluded"),
)
_BY_HAND = {
    "batch": "attention by hand, own entries of the batch",
    "rows": "attention by hand, rows of own queries",
    None: "attention by hand, on every rank",
}
_ROWS = 12  # of what a graph exchanges; the rest is summed up
_REPEATED = 4  # lines of a graph that repeat work
_NAMED = (Purpose.GRADIENT, Purpose.PARAMETER)
_EXCHANGES = ("received", "how", "for", "MiB", "messages", "line")


@dataclass(frozen=True)
class Explanation:
    """The graphs that one call ran, in order; print it for a table."""

    graphs: tuple[GraphReport, ...]

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """Every attention call of every graph."""
        return tuple(call for graph in self.graphs for call in graph.calls)

    @property
    def account(self) -> Account:
        """The account of all graphs, forward and backward."""
        return account_of(self.graphs)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Exchanges of all graphs, forward and backward, the largest first."""
        return tuple(self.account.exchanges())

    def work_ratio(self, direction: GraphDirection | None = None) -> float:
        """Return this rank's operations times the number of ranks, over one device's.

        All graphs count together. The ratio is 1 if the ranks share all work, and their
        number if each does all of it. Products, convolutions and attention count.
        direction: None for both directions together.
        """
        return self.account.work(direction).ratio

    def __str__(self) -> str:
        if not self.graphs:
            return 'no graph compiled by backend="cp" ran in this call'
        blocks = []
        for graph in self.graphs:
            rows, notes = _rows(graph)
            blocks.append(graph.summary())
            blocks += [text_table([_HEADER, *rows])] * bool(rows)
            blocks += [f"  {note}" for note in notes]
            blocks += [*_work_lines(graph.account), *_exchange_lines(graph.account)]
        return "\n".join(blocks)

    def to_json(self) -> str:
        """Return all graphs, calls, plans and candidates; see cost.plain_data."""
        return to_json(self)

    def draw(self, path: str | Path) -> None:
        """Draw the plan of every call into a file: timelines, work, crossovers.

        path: its name ends as a format that matplotlib writes, such as .svg, .png or
        .pdf. Calls with equal plans share a picture. Raises: InputError if no call has
        a plan, ImportError without matplotlib, naming the extra.
        """
        # Pictures are optional, and slow to import.
        from cpcompile.reporting.drawing import draw

        paths: dict[Plan, list[str]] = {}
        for call in self.calls:
            if call.plan is not None:
                paths.setdefault(call.plan, []).append(call.path)
        if not paths:
            raise InputError(
                f"Explanation.draw: {path}: none of {len(self.calls)} attention calls "
                "has a plan; needed one that is shared out"
            )
        draw(Path(path), {_how_many(calls): plan for plan, calls in paths.items()})


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` once and explain the compiled graphs that it ran.

    Args:
        fn: a function or module compiled with backend="cp"; compiled now if it was not.
        args, kwargs: the call's arguments. All ranks must call explain together.

    Returns: an Explanation: per attention call its module path, shapes, mask, layout,
    strategy, the kernel of its steps, predicted milliseconds, communication that
    nothing hides, the runner-up, and what is excluded and why. Predictions are those
    of the hardware profile that is named below the table. It also has everything that
    the ranks exchange in the forward and in the backward, by the line that causes it.
    """
    with recording() as reports:
        fn(*args, **kwargs)
    return Explanation(tuple(reports))


def _rows(graph: GraphReport) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a row per call, and notes: profiles, exclusions, what is gathered."""
    reasons: dict[str, int] = {}
    rows = [_row(call, reasons) for call in graph.calls]
    plans = [call.plan for call in graph.calls if call.plan is not None]
    notes = graph.edges()
    notes += [f"predicted for {name}" for name in sorted({p.hardware for p in plans})]
    notes += [f"[{number}] {text}" for text, number in reasons.items()]
    made = [call for call in graph.calls if call.latent_source]
    if made:
        others = f"; so it is for {len(made)} calls" if len(made) > 1 else ""
        notes.append(
            f"k and v of {made[0].path}: every rank computes them from "
            f"{made[0].latent_source}{others}"
        )
    notes += [str(x) for x in graph.mixers]
    notes += [f"{_BY_HAND[x.form]}: {x.path}: {x.reason}" for x in graph.by_hand]
    notes += [f"gathered output: {text}" for text in graph.gathered]
    return rows, notes


def _row(call: CallReport, reasons: dict[str, int]) -> tuple[str, ...]:
    """Return the row of a call; `reasons` numbers the exclusions of all, and grows."""
    shapes = (
        call.path,
        f"{list(call.query)} {call.dtype}",
        f"{call.key[1] if len(call.key) == 4 else 1} heads x {call.key[-2]}",
        call.mask,
    )
    plan = call.plan
    if plan is None:
        form, why = call.form or "not rewritten", call.reason or ""
        return (*shapes, "", form, "", "", "", "", "", why)
    numbers = [reasons.setdefault(n, len(reasons) + 1) for n in candidate_notes(plan)]
    return (
        *shapes,
        plan.layout.value,
        plan.chosen.strategy_name + (" (forced)" if plan.forced else ""),
        degrees_text(plan.chosen),
        call.kernel or "",
        milliseconds(plan.chosen.seconds),
        milliseconds(plan.chosen.exposed_seconds),
        plan.runner_up_text(config.tie_fraction),
        " ".join(f"[{number}]" for number in numbers),
    )


def _how_many(paths: list[str]) -> str:
    return f"{len(paths)} calls" if len(paths) > 1 else paths[0]


def _exchange_lines(account: Account) -> list[str]:
    """Return what a graph exchanges, in lines; none for one that exchanges nothing."""
    table = exchange_table(account.exchanges(), _ROWS)
    if not table:
        return []
    joined = [
        f"{join.calls} of the {join.kind.value}s of the {join.direction.value} travel "
        f"in {join.buckets} {'buckets' if join.buckets > 1 else 'bucket'}"
        for graph in account.graphs
        for join in graph.joined
    ]
    lines = [f"    {line}" for line in (*table, *joined)]
    return ["  exchanged, in bytes that this rank receives:", *lines]


def exchange_table(exchanges: Iterable[Exchange], most: int) -> list[str]:
    """Return a table, the largest first; what is after its first rows is summed up.

    A line of the program is a row; all gradients are one, and all parameters.
    """
    groups = grouped(
        exchanges,
        lambda x: (
            *(x.direction, x.kind, x.purpose),
            None if x.purpose in _NAMED else x.line,
        ),
    )
    if not groups:
        return []
    groups.sort(key=lambda group: -total(group).bytes)
    rows = [_EXCHANGES, *map(_exchange_row, groups[:most])]
    lines = text_table(rows, indent="").splitlines()
    if rest := [x for group in groups[most:] for x in group]:
        lines.append(f"and {len(rest)} more, {total(rest).bytes / MEBIBYTE:.3f} MiB")
    return lines


def _exchange_row(group: list[Exchange]) -> tuple[str, ...]:
    row = total(group)
    place = place_of(row) + (f" ({row.calls} calls)" if row.calls > 1 else "")
    what = row.purpose.value
    if row.purpose in _NAMED:
        what = f"{len(group)} {what}s" if len(group) > 1 else what
        place = row.what + (f", {group[1].what}, ..." if len(group) > 1 else "")
    return (
        row.direction.value,
        row.kind.value,
        what,
        f"{row.bytes / MEBIBYTE:.3f}",
        f"at most {row.messages}" if row.at_most else str(row.messages),
        place,
    )


def _work_lines(account: Account) -> list[str]:
    """Return lines: how a graph's work is shared out, and what is computed again."""
    graphs = [graph for graph in account.graphs if graph.work.whole_flops]
    if not graphs:
        return []
    ratios = ", ".join(f"{x.work.ratio:.2f} in the {x.direction.value}" for x in graphs)
    ranks = account.work().ranks
    repeated = [
        f"    {graph.direction.value}: {line.line}, {line.what}: "
        f"{line.repeated_flops(ranks) / graph.work.whole_flops:.0%} more"
        for graph in graphs
        for line in graph.work.repeated[:_REPEATED]
    ]
    return [f"  work of all {ranks} ranks over that of one device: {ratios}", *repeated]
