"""What all tools that write results share: their set-up, files and tables.

A record is what the JSON file holds; its "setup" says where and how it was measured.
Needs torch only, as tools/gpu runs where nothing is installed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from cpcompile.cost.plain_data import to_dict
from cpcompile.cost.plans.tables import text_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def setup(**more: Any) -> dict[str, Any]:
    """Collect what a reader needs to compare: versions, machine, date, load, `more`."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "load_average": [os.getloadavg()[0]],  # before and after, of one minute
        **more,
    }


def note_load(setup: dict[str, Any]) -> None:
    """Note the load after what was measured."""
    setup["load_average"][1:] = [os.getloadavg()[0]]


def setup_text(setup: Mapping[str, Any]) -> str:
    """Write versions, processors and date in words, and the load if it was noted."""
    words = (
        f"torch {setup['torch']}, Python {setup['python']}, {setup['processor']}, "
        f"{setup['date']}"
    )
    if "load_average" not in setup:
        return words
    before, after = setup["load_average"]
    return f"{words}; load average {before:.2f} before, {after:.2f} after"


def busy_note(setup: Mapping[str, Any]) -> list[str]:
    """Return lines that warn of times that were measured on a busy machine."""
    before = setup["load_average"][0]
    if before <= 1:
        return []
    return [
        f"Other processes kept the machine busy (load average {before:.1f} before the "
        "first measurement): times and verdicts are disturbed, and say little.",
        "",
    ]


def write_report(
    folder: Path,
    name: str,
    record: dict[str, Any],
    markdown: Callable[[dict[str, Any]], str],
) -> str:
    """Note the load, write the record and its report; return the report."""
    note_load(record["setup"])
    text = markdown(record)
    write_results(folder, name, record, text)
    return text


def write_results(folder: Path, name: str, record: Any, text: str) -> None:
    """Write the record as name.json and its report as name.md."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / f"{name}.json", json.dumps(to_dict(record), indent=1) + "\n")
    replace(folder / f"{name}.md", text)


def replace(path: Path, text: str) -> None:
    """Write a file at once, so that a kill leaves a whole one, old or new."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def markdown_table(
    head: Sequence[object], rows: Iterable[Sequence[object]]
) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for the terminal, in aligned columns."""
    print(f"\n{title}\n\n{text_table([head, *rows])}")


def at_most(name: str, ratio: float, target: float) -> list[str]:
    """Return a row of targets, of a ratio that may not be larger."""
    met = ratio <= target
    verdict = "met" if met else f"missed by {ratio / target - 1:.1%}"
    return [name, f"<= {target:g}", f"{ratio:.2f}", verdict]


def at_least(name: str, ratio: float, target: float) -> list[str]:
    """Return a row of targets, of a ratio that may not be smaller."""
    met = ratio >= target
    verdict = "met" if met else f"missed by {1 - ratio / target:.1%}"
    return [name, f">= {target:g}", f"{ratio:.2f}", verdict]
