"""Write the tables of layouts: busy and wall times, ratios against their targets."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

from tools.results import at_most, markdown_table, print_table, setup_text

WALL_TARGET, BUSY_TARGET = 0.65, 1.15
BALANCED = ("zigzag", "striped")  # which the targets are of
PASSES = ("forward", "both")

Sections = list[tuple[str, str, list[str], list[list[str]]]]


def print_tables(record: dict[str, Any]) -> None:
    """Print all tables to the terminal."""
    for title, text, head, rows in sections(record):
        print_table(title, head, rows)
        print(textwrap.fill(text, 100))


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    setup = record["setup"]
    lines = [
        f"# Layouts of a causal ring, {setup['ranks']} ranks of one thread",
        "",
        f"{setup['shape']}, {setup['tokens']} tokens; {setup_text(setup)} (with its "
        f"own ranks). Medians of {setup['reps']} rounds in which the layouts take "
        "turns. Busy: processor time inside of the attention steps, of rank 0, 1, and "
        "so on. Printed by `tools/in_venv python -m tools.bench layouts`.",
    ]
    for title, text, head, rows in sections(record):
        lines += ["", f"## {title}", "", text, "", *markdown_table(head, rows)]
    return "\n".join([*lines, ""])


def sections(record: dict[str, Any]) -> Sections:
    """Return title, text, header and rows of every table."""
    setup = record["setup"]
    ranks, cores = setup["ranks"], setup["cores"]
    head = ["layout", "pass", "busy, ms", "max / min", "wall, ms", "/ contiguous"]
    ideal = ranks / (2 * ranks - 1)
    busy, _ = medians(record["alone"], "contiguous", "forward")
    triangle = busy[0] / (busy[1] - busy[0])  # rank 1 has one rectangle more
    least = ranks * triangle / (ranks - 1 + triangle)
    return [
        (
            "Ranks of their own",
            "Every rank was measured alone on a core; the wall time is computed from "
            "these times, with the order of the messages and infinitely fast links.",
            head,
            times(record["alone"]),
        ),
        (
            f"{ranks} ranks on {cores} cores",
            "Measured with gloo. Where ranks share cores, a rank that waits gives its "
            "core away, and the wall time shows less of the imbalance.",
            head,
            times(record["shared"]),
        ),
        (
            "Against the targets",
            f"Of ranks of their own. Equal work would take {ideal:.2f} of the time of "
            f"the contiguous layout. A triangular step took {triangle:.2f} of the time "
            "of a rectangular one in the forward; striped has triangular ones only, so "
            f"that the kernel lets it come down to {least:.2f}.",
            ["layout", "pass", "ratio", "target", "got", "verdict"],
            targets(record),
        ),
    ]


def times(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return one line per layout and pass."""
    found = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        for each in PASSES:
            busy, wall = medians(rows, layout, each)
            _, base = medians(rows, "contiguous", each)
            found.append(
                [
                    layout,
                    each,
                    " ".join(f"{x * 1e3:.0f}" for x in busy),
                    f"{max(busy) / min(busy):.2f}",
                    f"{wall * 1e3:.0f}",
                    f"{wall / base:.2f}",
                ]
            )
    return found


def targets(record: dict[str, Any]) -> list[list[str]]:
    """Compare each target with what was measured: met, or missed by how much."""
    found = []
    for layout in BALANCED:
        for each in PASSES:
            busy, wall = medians(record["alone"], layout, each)
            _, base = medians(record["alone"], "contiguous", each)
            place = [layout, each]
            found.append(
                [*place, *at_most("wall / contiguous", wall / base, WALL_TARGET)]
            )
            ratio = max(busy) / min(busy)
            found.append([*place, *at_most("busy, max / min", ratio, BUSY_TARGET)])
    return found


def medians(
    rows: list[dict[str, Any]], layout: str, each: str
) -> tuple[list[float], float]:
    """Return each rank's busy seconds, and wall seconds, of forward or both passes."""
    count = PASSES.index(each) + 1
    own = [row for row in rows if row["layout"] == layout]
    busy = [
        statistics.median(sum(row["busy"][rank][:count]) for row in own)
        for rank in range(len(own[0]["busy"]))
    ]
    return busy, statistics.median(sum(row["wall"][:count]) for row in own)
