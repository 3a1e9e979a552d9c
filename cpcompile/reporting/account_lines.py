"""Accounts as lines of text: the largest exchanges first, gradients in one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cpcompile.accounting.graph_account import Exchange, GraphAccount, Purpose
from cpcompile.cost.plans.tables import text_table

MEBIBYTE = 2**20
_ROWS = 12  # of a graph; the rest is summed up
_REPEATED = 4  # lines of a graph that repeat work
_NAMED = (Purpose.GRADIENT, Purpose.PARAMETER)
_HEADER = ("received", "how", "for", "MiB", "messages", "line")


def exchange_lines(accounts: Sequence[GraphAccount]) -> list[str]:
    """Return what a graph exchanges, in lines; none for one that exchanges nothing."""
    rows = _merged(x for account in accounts for x in account.exchanges)
    if not rows:
        return []
    shown = [_HEADER, *(_row(group) for group in rows[:_ROWS])]
    lines = text_table(shown, indent="    ").splitlines()
    if rest := [x for group in rows[_ROWS:] for x in group]:
        lines.append(f"    and {len(rest)} more, {_mebibytes(rest)} MiB")
    lines += [
        f"    {join.calls} of the {join.kind.value}s of the {join.direction.value} "
        f"travel in {join.buckets} {'buckets' if join.buckets > 1 else 'bucket'}"
        for account in accounts
        for join in account.joined
    ]
    return ["  exchanged, in bytes that this rank receives:", *lines]


def work_lines(accounts: Sequence[GraphAccount]) -> list[str]:
    """Return lines: how a graph's work is shared out, and what is computed again."""
    counted = [account for account in accounts if account.work.whole_flops]
    if not counted:
        return []
    ratios = ", ".join(
        f"{x.work.ratio:.2f} in the {x.direction.value}" for x in counted
    )
    lines = [
        f"  work of all {counted[0].work.ranks} ranks over that of one device: {ratios}"
    ]
    for account in counted:
        work = account.work
        lines += [
            f"    {account.direction.value}: {line.line}, {line.what}: "
            f"{line.repeated_flops(work.ranks) / work.whole_flops:.0%} more"
            for line in work.repeated[:_REPEATED]
        ]
    return lines


def work_ratio(accounts: Iterable[GraphAccount]) -> float:
    """Return the work of all ranks over that of one device, for several graphs.

    It is 1 if the ranks share all work, and their number if each does all of it.
    """
    together, whole = 0.0, 0.0
    for account in accounts:
        together += account.work.flops * account.work.ranks
        whole += account.work.whole_flops
    return together / whole if whole else 1.0


def _merged(exchanges: Iterable[Exchange]) -> list[list[Exchange]]:
    """Merge exchanges: a row per line, one for all gradients, one for parameters."""
    rows: dict[object, list[Exchange]] = {}
    for x in exchanges:
        place = None if x.purpose in _NAMED else x.line
        rows.setdefault((x.direction, x.kind, x.purpose, place), []).append(x)
    return sorted(rows.values(), key=lambda group: -sum(x.bytes for x in group))


def _row(group: list[Exchange]) -> tuple[str, ...]:
    first = group[0]
    messages = str(sum(x.messages for x in group))
    at_most = any(x.at_most for x in group)
    calls = sum(x.calls for x in group)
    place = str(first.line) + (f" ({calls} calls)" if calls > 1 else "")
    what = first.purpose.value
    if first.purpose in _NAMED:
        what = f"{len(group)} {what}s" if len(group) > 1 else what
        place = first.what + (f", {group[1].what}, ..." if len(group) > 1 else "")
    return (
        first.direction.value,
        first.kind.value,
        what,
        _mebibytes(group),
        f"at most {messages}" if at_most else messages,
        place,
    )


def _mebibytes(exchanges: Iterable[Exchange]) -> str:
    return f"{sum(x.bytes for x in exchanges) / MEBIBYTE:.3f}"
