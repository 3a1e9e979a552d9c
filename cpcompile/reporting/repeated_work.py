"""Warn once about what every rank computes again, or gathers, and from which lines.

Results are right all the same, so that nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cpcompile.accounting.graph_account import Exchange, Line, LineWork, Purpose
from cpcompile.logs import warn_once
from cpcompile.reporting.account_lines import MEBIBYTE, work_ratio
from cpcompile.reporting.graph_report import GraphReport

MOST_WORK = 1.2
"""Work of all ranks together over one device's; more is a reason for a warning."""
LEAST_BYTES, LEAST_PART = MEBIBYTE, 0.01
"""What a line gathers, or computes again, is not worth a word below either of these."""
_NAMED = 5  # lines


def warn_about_accounts(report: GraphReport) -> None:
    """Name the lines that repeat work or gather values, if these are much of a step.

    There is none for a graph where nothing is sharded: it has a warning of its own.
    """
    if not report.distributed_calls:
        return
    exchanges = [x for account in report.accounts for x in account.exchanges]
    attention = sum(x.bytes for x in exchanges if x.purpose is Purpose.ATTENTION)
    values = [x for x in exchanges if x.purpose is Purpose.VALUE]
    ratio, gathered = _unplanned_ratio(report), sum(x.bytes for x in values)
    lines: list[str] = []
    if ratio > MOST_WORK:
        lines += _repeating(report)
    if gathered > attention:
        lines += _gathering(values, sum(x.bytes for x in exchanges))
    if not lines:
        return
    more = f", and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
    warn_once(
        f"{report.frame}: the {report.ranks} ranks together do {ratio:.2f} times the "
        f"work of one device, and each receives {gathered / MEBIBYTE:.1f} MiB of "
        f"values beside {attention / MEBIBYTE:.1f} MiB for attention, because of "
        f"{'; '.join(lines[:_NAMED])}{more}. Results are correct. {_FIXES}"
    )


_FIXES = (
    "What reorders tokens by data, or loops over parts of them, gathers all of them: "
    "mask tokens instead (labels of -100, weights of zero), reorder hidden states and "
    "not logits, call on all tokens at once. print(cp.explain(...)) lists every line"
)


def _unplanned_ratio(report: GraphReport) -> float:
    """Return the ratio of work, without what plans have every rank do."""
    works = [account.work for account in report.accounts]
    whole = sum(work.whole_flops for work in works)
    planned = sum(
        row.repeated_flops(report.ranks)
        for work in works
        for row in work.repeated
        if row.planned
    )
    return work_ratio(report.accounts) - (planned / whole if whole else 0.0)


def _repeating(report: GraphReport) -> Iterator[str]:
    """Yield the lines whose work the ranks do several times, most of it first."""
    works = [account.work for account in report.accounts]
    whole = sum(work.whole_flops for work in works)
    lines: dict[Line, list[LineWork]] = {}
    for row in (x for work in works for x in work.repeated if not x.planned):
        lines.setdefault(row.line, []).append(row)
    more = {
        line: sum(row.repeated_flops(report.ranks) for row in rows) / whole
        for line, rows in lines.items()
        if sum(row.bytes for row in rows) >= LEAST_BYTES
    }
    for line, part in sorted(more.items(), key=lambda x: -x[1]):
        if part >= LEAST_PART:
            place = _place(line, lines[line][0].what)
            yield f"{place} (work is done again: {part:.0%})"


def _gathering(values: Iterable[Exchange], received: int) -> Iterator[str]:
    """Yield the lines that receive most, the largest first."""
    lines: dict[Line, list[Exchange]] = {}
    for exchange in values:
        lines.setdefault(exchange.line, []).append(exchange)
    sizes = {line: sum(x.bytes for x in rows) for line, rows in lines.items()}
    for line, size in sorted(sizes.items(), key=lambda x: -x[1]):
        if size >= max(LEAST_BYTES, LEAST_PART * received):
            calls = sum(x.calls for x in lines[line])
            times = f" in {calls} calls" if calls > 1 else ""
            place = _place(line, lines[line][0].what)
            yield f"{place} (gathers {size / MEBIBYTE:.1f} MiB{times})"


def _place(line: Line, what: str) -> str:
    where = f"{line.file}:{line.number}" if line.number else str(line)
    return where if what == "<top level>" else f"{where} in {what}"
