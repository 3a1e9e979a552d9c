"""Write the tables of strategies: predicted and measured times, and regrets."""

from __future__ import annotations

import statistics
from typing import Any

from tools.results import markdown_table, print_table, setup_text

MEAN_TARGET, WORST_TARGET = 0.05, 0.15
# Strategies whose measured times differ by less are taken as equally good: timings of
# one strategy differ by as much between two runs.
SAME = 0.05


def print_tables(record: dict[str, Any]) -> None:
    """Print one table per section, and its summary, to the terminal."""
    for section in record["sections"]:
        print_table(section["name"], *strategies_table(section))
        for line in summary(section):
            print(line)


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    setup = record["setup"]
    lines = [
        "# Strategies: predicted and measured",
        "",
        f"{setup['shape']}; {setup_text(setup)}. Each cell: predicted / measured "
        "milliseconds; measured is the median of the fastest quarter of interleaved "
        "rounds, from the first rank's start to the last rank's end. Regret: time of "
        "the chosen strategy over the best one, minus 1. Others: the part of the cores "
        "that other processes used meanwhile. Every section was calibrated first. "
        "Printed by `tools/in_venv python -m tools.bench strategies`.",
    ]
    for section in record["sections"]:
        head, rows = strategies_table(section)
        lines += ["", f"## {section['name']}", "", *markdown_table(head, rows), ""]
        lines += [f"- {line}" for line in summary(section)]
    if "no_network" in setup:
        lines += ["", f"No network namespaces: {setup['no_network']}."]
    return "\n".join([*lines, ""])


def strategies_table(section: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows: one shape each."""
    labels = sorted({label for row in section["rows"] for label in row["measured"]})
    head = ["tokens", "heads", "dim", "mask", *labels, "chosen", "best", "regret"]
    head.append("others")  # the part of the cores that other processes used
    rows = []
    for row in section["rows"]:
        cells = [
            f"{row['predicted'][label] * 1e3:.1f} / {row['measured'][label] * 1e3:.1f}"
            if label in row["measured"]
            else ""
            for label in labels
        ]
        rows.append(
            [
                str(row["tokens"]),
                f"8:{row['kv_heads']}",
                str(row["head_dim"]),
                "causal" if row["causal"] else "full",
                *cells,
                row["chosen"],
                row["best"],
                f"{row['regret']:.1%}",
                f"{row['other_processes']:.0%}",
            ]
        )
    return head, rows


def summary(section: dict[str, Any]) -> list[str]:
    """List regrets against their targets, errors of predictions, crossovers."""
    rows = section["rows"]
    regrets = [row["regret"] for row in rows]
    mean, worst = statistics.mean(regrets), max(regrets)
    untied = [
        row["measured"][min(row["predicted"], key=row["predicted"].get)]
        / min(row["measured"].values())
        - 1
        for row in rows
    ]
    errors = [
        abs(row["predicted"][label] / row["measured"][label] - 1)
        for row in rows
        for label in row["measured"]
    ]
    lines = [
        f"regret: mean {mean:.1%} ({_verdict(mean, MEAN_TARGET)}), worst {worst:.1%} "
        f"({_verdict(worst, WORST_TARGET)})",
        "regret of the fastest predicted, without the rule for ties: mean "
        f"{statistics.mean(untied):.1%}, worst {max(untied):.1%}",
        f"error of predicted times: median {statistics.median(errors):.0%}, worst "
        f"{max(errors):.0%}",
        f"other processes while it was calibrated: "
        f"{section['about']['other_processes']}; while it ran: median "
        f"{statistics.median(row['other_processes'] for row in rows):.0%}",
    ]
    lines += [
        f"{name.removeprefix('fit_error_')}: {text}"
        for name, text in section["about"].items()
        if name.startswith("fit_error_")
    ]
    if section["left_out"]:
        lines.append(f"shapes left out for lack of time: {section['left_out']}")
    return lines + crossovers(rows)


def crossovers(rows: list[dict[str, Any]]) -> list[str]:
    """Find strategies whose order changes with the shape, and say if it is predicted.

    Shapes at which a pair is equally fast, by SAME, are on both sides.
    """
    lines = []
    labels = sorted({label for row in rows for label in row["measured"]})
    for i, one in enumerate(labels):
        for other in labels[i + 1 :]:
            sides = [_side(row["measured"], one, other) for row in rows]
            if not {-1, 1} <= set(sides):
                continue
            predicted = [_side(row["predicted"], one, other, 0.0) for row in rows]
            clear = [pair for pair in zip(sides, predicted, strict=True) if pair[0]]
            right = sum(a == b for a, b in clear)
            lines.append(
                f"{one} against {other}: each is clearly faster at some shapes; "
                f"predicted on the right side at {right} of {len(clear)}"
            )
    return lines


def _side(times: dict[str, float], one: str, other: str, same: float = SAME) -> int:
    """Return -1 if `one` is faster, 1 if `other` is, 0 if they are equally fast."""
    if one not in times or other not in times:
        return 0
    ratio = times[one] / times[other]
    if 1 / (1 + same) <= ratio <= 1 + same:
        return 0
    return -1 if ratio < 1 else 1


def _verdict(value: float, target: float) -> str:
    return f"{'meets' if value <= target else 'misses'} {target:.0%}"
