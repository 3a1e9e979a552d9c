"""Record what pytest reported, for docs/compatibility.md; see `tools/test`.

    python -m tools.models.record_tests REPORT.xml...

REPORT.xml is what `pytest --junitxml` wrote, with the torch of this environment. What
is recorded of other versions of torch, and of folders that were not run, stays.
"""

from __future__ import annotations

import json
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from tools.models import versions


def main() -> int:
    from tools.models import report  # brings all models, which takes many seconds

    if len(sys.argv) == 1:
        print(__doc__, file=sys.stderr)
        return 2
    setup = {
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    found = rows(sys.argv[1:], setup)
    if not found:
        print("record_tests: the reports have no tests", file=sys.stderr)
        return 1
    path = versions.RECORD
    known = versions.read() if path.exists() else []
    every = merged(known, found)
    lines = ",\n  ".join(json.dumps(row) for row in every)
    path.write_text(f"[\n  {lines}\n]\n")
    report.PAGE.write_text(report.markdown(json.loads(report.RECORD.read_text())))
    for row in found:
        print(f"torch {row['torch']}, {row['folder']}: {row['passed']} passed", end="")
        print(f", {row['skipped']} skipped, {len(row['failures'])} failed")
    return 0


def rows(reports: Iterable[str], setup: dict[str, str]) -> list[dict[str, Any]]:
    """Make one row per folder of tests, of all reports together."""
    counts: dict[str, dict[str, Any]] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname", "")
            folder = "/".join(module.split(".")[:2])
            own = counts.setdefault(folder, {"passed": 0, "skipped": 0, "failures": []})
            if any(case.find(kind) is not None for kind in ("failure", "error")):
                own["failures"].append(f"{module}.{case.get('name')}")
            else:
                skipped = case.find("skipped") is not None
                own["skipped" if skipped else "passed"] += 1
    return [{**setup, "folder": name, **own} for name, own in sorted(counts.items())]


def merged(
    known: list[dict[str, Any]], found: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Put `found` in the place of what was known of the same version and folder."""
    by_run = {(row["torch"], row["folder"]): row for row in [*known, *found]}
    return sorted(by_run.values(), key=_place)


def _place(row: dict[str, Any]) -> tuple[list[int], str, str]:
    """Return a key that sorts later versions first."""
    numbers = row["torch"].partition("+")[0].split(".")
    return [-int(n) for n in numbers[:2]], row["torch"], row["folder"]


if __name__ == "__main__":
    sys.exit(main())
