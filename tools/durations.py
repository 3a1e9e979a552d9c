"""Record how long tests take, in tests/durations.json; see `tools/test --record`.

    python -m tools.durations REPORT.xml...

REPORT.xml is what `pytest --junitxml` wrote. Tests that are not in a report stay as
they are recorded; what is no longer in tests/ goes. A function has one line: the
seconds of a typical case, how many cases were timed, the seconds of cases that take
much more or less, and, where `python -m tools.mutants` recorded it, how many lines the
function covers that cheaper ones do not.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from tests.case_selection import DURATIONS, WITH_TORCH

ROOT = DURATIONS.parents[1]
Seconds = Mapping[str, Mapping[str, Mapping[str, float]]]  # by file, function and case
Entries = dict[str, dict[str, list[Any]]]  # by file and function


def main() -> int:
    """Add the reports to the record."""
    if len(sys.argv) == 1:
        print(__doc__, file=sys.stderr)
        return 2
    timed = read(map(Path, sys.argv[1:]))
    if not timed:
        print("durations: the reports have no tests that passed", file=sys.stderr)
        return 1
    record = {"torch": "", "tests": {}}
    if DURATIONS.exists():
        record = json.loads(DURATIONS.read_text())
    if not record["torch"] or any(x.startswith(WITH_TORCH) for x in timed):
        record["torch"] = version("torch").partition("+")[0]
    record["tests"] = existing(merged(record["tests"], timed), ROOT)
    write(record)
    count = sum(len(x) for x in timed.values())
    print(f"recorded in tests/durations.json: {count} test functions")
    return 0


def read(reports: Iterable[Path]) -> Seconds:
    """Return the seconds of all cases that did not fail."""
    timed: Any = defaultdict(lambda: defaultdict(dict))
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is None and case.find("error") is None:
                file = case.get("classname", "").replace(".", "/") + ".py"
                name, _, parameters = case.get("name", "").partition("[")
                seconds = float(case.get("time", 0))
                timed[file][name][parameters.removesuffix("]")] = seconds
    return timed


def merged(entries: Entries, timed: Seconds) -> Entries:
    """Bring `entries` up to date, and leave alone what hardly changed."""
    result = {file: dict(row) for file, row in entries.items()}
    for file, functions in timed.items():
        row = result.setdefault(file, {})
        for name, cases in functions.items():
            row[name] = _entry(row.get(name), cases)
    return result


def _entry(old: list[Any] | None, cases: Mapping[str, float]) -> list[Any]:
    typical = rounded(median(cases.values()))
    count, others, lines = len(cases), {}, []
    if old is not None:
        count, others, lines = max(count, old[1]), dict(old[2]), old[3:]
        # Few cases say little of the others.
        if len(cases) < old[1] or _is_alike(typical, old[0]):
            typical = old[0]
    for case, seconds in cases.items():
        kept = others.pop(case, None)
        if not _is_alike(seconds, typical):
            is_kept = kept is not None and _is_alike(seconds, kept)
            others[case] = kept if is_kept else rounded(seconds)
    return [typical, count, dict(sorted(others.items())), *lines]


def _is_alike(one: float, other: float) -> bool:
    return abs(one - other) <= max(0.05, 0.4 * max(one, other))


def rounded(seconds: float) -> float:
    """Round to two digits, and at most to hundredths."""
    return round(float(f"{seconds:.2g}"), 2)


def existing(entries: Entries, root: Path) -> Entries:
    """Leave out functions that are no longer defined in files of `root`."""
    result: Entries = {}
    for file, row in entries.items():
        path = root / file
        text = path.read_text() if path.exists() else ""
        if kept := {x: y for x, y in row.items() if f"def {x}(" in text}:
            result[file] = kept
    return result


def write(record: Mapping[str, Any], path: Path = DURATIONS) -> None:
    """Write a line for each function, in order."""
    files = []
    for file, row in sorted(record["tests"].items()):
        lines = [f"  {json.dumps(x)}: {json.dumps(y)}" for x, y in sorted(row.items())]
        files.append(f" {json.dumps(file)}: {{\n" + ",\n".join(lines) + "\n }")
    head = f'{{"torch": {json.dumps(record["torch"])}, "tests": {{\n'
    path.write_text(head + ",\n".join(files) + "\n}}\n")


if __name__ == "__main__":
    sys.exit(main())
