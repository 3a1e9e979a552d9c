"""Count how many small faults of the passes the tests of a default run find.

Mutants are drawn with a fixed seed from the passes, the operators and the geometry, by
the operators of Cosmic Ray. Each meets the tests that run its line, the quickest first,
until one fails; which lines each test runs is recorded once, also on the ranks that it
starts. A mutant of a line that runs on import meets the tests that run anything of its
file. What was done is kept in build/mutants, so that a run goes on where another one
ended; docs/results/mutants.md gets the share and the survivors.

    python -m tools.mutants                          this checkout, its default run
    python -m tools.mutants --tree ../base --name base
    python -m tools.mutants --tests FILE             other tests, one id per line
    python -m tools.mutants --lines                  no mutants: which lines tests run,
                                                     into tests/durations.json too
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import coverage

from tests.case_selection import DURATIONS, Durations, lane, split
from tools import durations
from tools.mutants.mutations import AREAS, Mutant, draw, statement
from tools.results import (
    RESULTS,
    ROOT,
    markdown_table,
    replace,
    setup,
    setup_text,
    write_report,
)

HERE = Path(__file__).parent
COPIED = ("cpcompile", "passes", "tests", "tools", "docs", "pyproject.toml")
LIMIT_SECONDS = 300  # of one mutant; later it counts as found, as tests take a fifth
JOBS = 2  # mutants at once

Lines = Mapping[str, Mapping[int, set[str]]]  # tests by file and line


def main() -> int:
    """Run what the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--name", default="now", help="of its row in the report")
    parser.add_argument("--tests", type=Path, help="a file of ids of tests")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=60, help="of tests, which a mutant meets"
    )
    parser.add_argument("--lines", action="store_true")
    options = parser.parse_args()
    tree = options.tree.resolve()
    state = ROOT / "build" / "mutants" / digest(tree, options.tests)
    state.mkdir(parents=True, exist_ok=True)
    print(f"{tree}: what is done is kept in {state}", flush=True)
    copies = [copied(tree, state / f"tree{n}") for n in range(JOBS)]
    chosen = chosen_tests(copies[0], state, options.tests)
    outcomes = record_lines(copies[0], state, chosen)
    lines = read_lines(copies[0], state)
    if options.lines:
        record_gains(gains(lines, outcomes))
        return 0
    start = setup(
        seed=options.seed,
        seconds_of_tests=options.seconds,
        tests=len(outcomes),
        failed_before=sum(not passed for _, passed in outcomes.values()),
    )
    mutants = draw(tree, options.count, options.seed)
    results = run_all(mutants, copies, state, lines, outcomes, options.seconds)
    path = RESULTS / "mutants.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    rows[options.name] = {"setup": start, "mutants": results}
    print(write_report(RESULTS, "mutants", {"setup": start, "rows": rows}, markdown))
    return 0


def digest(tree: Path, tests: Path | None) -> str:
    """Name what results depend on: the sources, the tests, and which of them run."""
    known = hashlib.sha256(tests.read_bytes() if tests else b"")
    for top in ("cpcompile", "passes", "tests"):
        for path in sorted((tree / top).rglob("*")):
            if path.suffix in (".py", ".txt", ".jinja") or path.name == DURATIONS.name:
                known.update(f"{path.relative_to(tree)}\n".encode())
                known.update(path.read_bytes())
    return known.hexdigest()[:12]


def pytest(
    tree: Path, arguments: Sequence[str], timeout: float | None = None, **variables: str
) -> tuple[int | None, str]:
    """Run pytest in a tree; return its exit code, None after the timeout, and text."""
    environment = os.environ | variables
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(tree), str(HERE), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "line_contexts", "-p"]
    command += ["no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):  # its processes too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chosen_tests(tree: Path, state: Path, tests: Path | None) -> list[str]:
    """Return the tests of `tests`, or those that a run without names takes."""
    if tests:
        return [x for x in tests.read_text().splitlines() if x]
    path = state / "default.json"
    if not path.exists():
        code, text = pytest(tree, ["--collect-only"], CPCOMPILE_OUTCOMES=str(path))
        assert code == 0, text[-5000:]
    return list(json.loads(path.read_text()))


def record_lines(
    tree: Path, state: Path, tests: Sequence[str]
) -> dict[str, tuple[float, bool]]:
    """Run all tests once, in two processes; return seconds and outcome of each."""
    path = state / "outcomes.json"
    if not path.exists():
        shutil.rmtree(state / "lines", ignore_errors=True)
        (state / "lines").mkdir()
        with ThreadPoolExecutor(2) as pool:
            halves = list(pool.map(lambda n: _record(tree, state, tests, n), (1, 2)))
        replace(path, json.dumps({x: y for half in halves for x, y in half.items()}))
    return {x: (y[0], y[1]) for x, y in json.loads(path.read_text()).items()}


def _record(
    tree: Path, state: Path, tests: Sequence[str], n: int
) -> dict[str, tuple[float, bool]]:
    taken = lane(tests, Durations.read(), f"{n}/2")
    if not taken:
        return {}
    names, outcomes = state / f"tests{n}.txt", state / f"outcomes{n}.json"
    names.write_text("\n".join(x for x in tests if x in taken))
    code, text = pytest(
        tree,
        ["--timeout=1200", f"@{names}"],
        CPCOMPILE_LINES=str(state / "lines"),
        CPCOMPILE_OUTCOMES=str(outcomes),
    )
    print(text[-2000:], flush=True)
    assert code in (0, 1), "pytest could not run the tests"
    return dict(json.loads(outcomes.read_text()))


def read_lines(tree: Path, state: Path) -> Lines:
    """Return which tests ran which lines; "" stands for imports."""
    path = state / "all_lines"
    measuring = coverage.Coverage(data_file=str(path), config_file=False)
    if not path.exists():
        files = [str(x) for x in (state / "lines").iterdir()]
        measuring.combine(files, strict=True, keep=True)
        measuring.save()
    measuring.load()
    found = measuring.get_data()
    lines = {}
    for name in found.measured_files():
        file = str(Path(name).resolve().relative_to(tree))
        rows = found.contexts_by_lineno(name)
        lines[file] = {line: set(tests) for line, tests in rows.items()}
    return lines


def covering(mutant: Mutant, tree: Path, lines: Lines) -> set[str]:
    """Return the tests that run the statement of a mutant."""
    rows = lines.get(mutant.file, {})
    place = statement((tree / mutant.file).read_text(), mutant.line)
    tests = {x for line in place for x in rows.get(line, ())}
    if "" in tests:  # it runs on import
        tests = {x for found in rows.values() for x in found}
    return tests - {""}


def run_all(
    mutants: Iterable[Mutant],
    copies: Sequence[Path],
    state: Path,
    lines: Lines,
    outcomes: Mapping[str, tuple[float, bool]],
    seconds: float,
) -> list[dict[str, Any]]:
    """Run what was not run before; return the results of all."""
    record = state / f"results-{seconds:g}.jsonl"
    rows = record.read_text().splitlines() if record.exists() else []
    done = {row["name"]: row for row in map(json.loads, rows)}
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def result(mutant: Mutant) -> dict[str, Any]:
        if mutant.name in done:
            return done[mutant.name]
        copy = free.get()
        try:
            tests = covering(mutant, copy, lines)
            passed = [x for x in tests if outcomes.get(x, (0, False))[1]]
            row = run(mutant, copy, passed, outcomes, seconds)
        finally:
            free.put(copy)
        with record.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['outcome']}: {mutant.name}: {row['change']}\n", end="", flush=True)
        return row

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(result, mutants))


def copied(tree: Path, copy: Path) -> Path:
    """Copy what tests need, to change files there."""
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(tree / name, copy / name)
    return copy


def run(
    mutant: Mutant,
    copy: Path,
    tests: Sequence[str],
    outcomes: Mapping[str, tuple[float, bool]],
    seconds: float,
) -> dict[str, Any]:
    """Run as many of the tests as take `seconds`, the quickest first."""
    chosen: list[str] = []
    total = 0.0
    for test in sorted(tests, key=lambda x: (outcomes[x][0], x)):
        if chosen and (total := total + outcomes[test][0]) > seconds:
            break
        chosen.append(test)
    row = {
        **dataclasses.asdict(mutant),
        "name": mutant.name,
        "change": mutant.change(copy),
        "tests": len(chosen),
        "of": len(tests),
    }
    if not chosen:
        return row | {"outcome": "not run by any test", "by": "", "seconds": 0}
    path, names = copy / mutant.file, copy / "tests-of-mutant.txt"
    before, start = path.read_text(), time.monotonic()
    names.write_text("\n".join(chosen))
    try:
        path.write_text(mutant.source(copy))
        code, text = pytest(
            copy,
            ["-x", "--timeout=120", f"@{names}"],
            LIMIT_SECONDS,
            CPCOMPILE_OUTCOMES=os.devnull,
        )
    finally:
        path.write_text(before)
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", text, re.MULTILINE)
    by = failed[1] if failed else "" if code == 0 else "import" if code else "time"
    return row | {
        "outcome": "survived" if code == 0 else "found",
        "by": by,
        "seconds": round(time.monotonic() - start, 1),
    }


def gains(lines: Lines, outcomes: Mapping[str, tuple[float, bool]]) -> dict[str, int]:
    """Return how many lines each test function adds to those that stand before it.

    The first is that with the most lines per second, and so on.
    """
    own: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for file, rows in lines.items():
        for line, tests in rows.items():
            for test in tests - {""}:
                own[split(test)[0]].add((file, line))
    seconds: Counter[str] = Counter()
    for test, (taken, _) in outcomes.items():
        seconds[split(test)[0]] += max(taken, 0.01)
    added = {}
    while own:
        best = max(sorted(own), key=lambda x: len(own[x]) / seconds[x])
        covered = own.pop(best)
        added[best] = len(covered)
        for other in own.values():
            other -= covered
    return added


def record_gains(added: Mapping[str, int]) -> None:
    """Add them to tests/durations.json, for the tests that it has."""
    if not DURATIONS.exists():
        sys.exit("mutants: record durations first, by tools/test --record")
    record = json.loads(DURATIONS.read_text())
    for file, row in record["tests"].items():
        for name, entry in row.items():
            if (lines := added.get(f"{file}::{name}")) is not None:
                entry[3:] = [lines]
    durations.write(record)


def markdown(record: dict[str, Any]) -> str:
    """Write the report: a row per checkout, then the survivors of the last one."""
    rows = record["rows"]
    head = ["tests of", "run", *AREAS, "found", "survived", "not run"]
    table = []
    for name, row in rows.items():
        outcomes = Counter(x["outcome"] for x in row["mutants"])
        cells = [_share([x for x in row["mutants"] if x["area"] == a]) for a in AREAS]
        cells += [f"**{_share(row['mutants'])}**"]
        cells += [outcomes["survived"], outcomes["not run by any test"]]
        table.append([name, row["setup"]["tests"], *cells])
    text = [
        "# Faults that the tests find",
        "",
        f"{setup_text(record['setup'])}. Small faults, drawn with seed "
        f"{record['setup']['seed']}, of the operators of Cosmic Ray; each meets the "
        "tests of a run without names that run its line, the quickest first, for "
        f"{record['setup']['seconds_of_tests']:g} s. Printed by `python -m "
        "tools.mutants`.",
        "",
        *markdown_table(head, table),
    ]
    for name, row in rows.items():
        text += ["", f"## Not found: {name}", ""]
        for mutant in sorted(row["mutants"], key=lambda x: (x["file"], x["line"])):
            if mutant["outcome"] != "found":
                text.append(
                    f"- {mutant['file']}:{mutant['line']}, {mutant['outcome']} "
                    f"({mutant['tests']} of {mutant['of']} tests): "
                    f"`{mutant['change'].replace('`', '')}`"
                )
    return "\n".join(text) + "\n"


def _share(mutants: Sequence[Mapping[str, Any]]) -> str:
    found = sum(x["outcome"] == "found" for x in mutants)
    return f"{found} of {len(mutants)}" if mutants else ""


if __name__ == "__main__":
    sys.exit(main())
