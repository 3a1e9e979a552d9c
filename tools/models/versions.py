"""The section of docs/compatibility.md on versions of torch, as tests recorded them."""

from __future__ import annotations

import json
from typing import Any

from tools.results import RESULTS

RECORD = RESULTS / "torch_versions.json"
_INTRODUCTION = """\
## Versions of torch

The tests of this repository with several versions of torch, by folder. Cells are
written by `tools/test --torch VERSION --record-counts`; with the name of a folder, it
runs all tests of that folder. An empty cell was not run.
"""


def read() -> list[dict[str, Any]]:
    """Read the rows: one per version and folder, later versions first."""
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text())
    return rows


def section(rows: list[dict[str, Any]]) -> list[str]:
    """Write the lines of the section: a row per version, then the failed tests."""
    lines = [*_INTRODUCTION.splitlines(), ""]
    if not rows:
        return [*lines, "Nothing is recorded yet."]
    folders = sorted({row["folder"] for row in rows})
    lines += [f"| torch | {' | '.join(folders)} | when |"]
    lines += [f"|{' --- |' * (len(folders) + 2)}"]
    for version in dict.fromkeys(row["torch"] for row in rows):
        own = {row["folder"]: row for row in rows if row["torch"] == version}
        cells = [_cell(own[name]) if name in own else "" for name in folders]
        dates = sorted({row["date"] for row in own.values()})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"| {version} | {' | '.join(cells)} | {when} |")
    failures = [(row, name) for row in rows for name in row["failures"]]
    if failures:
        lines += ["", "Failed:", ""]
        lines += [f"- torch {row['torch']}: `{name}`" for row, name in failures]
    return lines


def _cell(row: dict[str, Any]) -> str:
    """Write a cell, such as "3 passed" or "3 passed, 1 skipped, **2 failed**"."""
    words = [f"{row['passed']} passed"]
    if row["skipped"]:
        words.append(f"{row['skipped']} skipped")
    if row["failures"]:
        words.append(f"**{len(row['failures'])} failed**")
    return ", ".join(words)
