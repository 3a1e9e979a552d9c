"""Run the models of tests/models on CPU ranks, and compare each with one process.

Every model is unmodified, with random weights: a training step, a forward in eval
mode, several calls of one compiled model, every strategy, 2 and 4 ranks. Prints a line
per run as it goes. --write brings docs/compatibility.md and
docs/results/compatibility.json up to date; what was not run stays as it was there.
`python -m tools.models sweep` runs every family of transformers instead, and
`python -m tools.models operators` every operator of torch, with torch's own samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import torch

from tests.cpu.workers import Pools
from tests.models.outcome import Outcome, Verdict
from tests.models.plan import settings
from tests.models.run_case import run_case
from tests.models.setting import Setting
from tests.models.zoo import CASES
from tools.models import operators, sweep
from tools.models.report import PAGE, RECORD, markdown, mixer_counts
from tools.results import note_load, replace, setup

LIBRARIES = ("torch", "transformers", "timm", "diffusers", "torchvision")
BUGS = (Verdict.WRONG, Verdict.CRASH)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.models", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--models", nargs="*", metavar="NAME", help="whole names or their beginnings"
    )
    parser.add_argument("--worlds", type=int, nargs="*", help="only so many ranks")
    parser.add_argument("--inner", choices=("aot_eager", "inductor"), help="only it")
    parser.add_argument("--missing", action="store_true", help="what has no record yet")
    parser.add_argument("--quick", action="store_true", help="one step, one forward")
    parser.add_argument("--write", action="store_true", help="write docs/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = list(planned(options.models, options.worlds, options.quick))
    if not plan:
        print(f"no case is called so; there are: {', '.join(CASES)}", file=sys.stderr)
        return 2
    known = set(map(_run, record().get("runs", ()))) if options.missing else set()
    plan = [
        (name, setting)
        for name, setting in plan
        if options.inner in (None, setting.inner)
        and (name, json.dumps(setting.as_json())) not in known
    ]
    about = setup(**{name: version(name) for name in LIBRARIES})
    started, found = time.monotonic(), []
    for outcome in outcomes(plan):
        found.append(outcome)
        show(len(found), len(plan), outcome)
        if options.write:  # what there is, if a later run fails
            write(found, about)
    counts = {v: sum(o.verdict is v for o in found) for v in Verdict}
    words = ", ".join(f"{n} {v.value}" for v, n in counts.items())
    print(f"{len(found)} runs in {time.monotonic() - started:.0f} s: {words}")
    return int(any(o.verdict in BUGS for o in found))


def planned(
    names: list[str] | None, worlds: list[int] | None, quick: bool
) -> Iterator[tuple[str, Setting]]:
    """Yield the runs, case by case."""
    for name, case in CASES.items():
        if names and not any(name.startswith(n) for n in names):
            continue
        for setting in settings(case, quick):
            if not worlds or setting.world in worlds:
                yield name, setting


def outcomes(plan: Iterable[tuple[str, Setting]]) -> Iterator[Outcome]:
    """Run the plan, on processes that are kept."""
    pools = Pools()
    try:
        for name, setting in plan:
            yield run_case(pools, name, setting)
    finally:
        pools.close()


def show(number: int, total: int, outcome: Outcome) -> None:
    """Print one line, and under it what is wrong."""
    print(
        f"{number:4}/{total} {outcome.case:24} {outcome.setting!s:34} "
        f"{outcome.verdict.value:8} {outcome.error:8.1e}  "
        f"{outcome.sharded}/{outcome.attention} attention  "
        f"mixers: {mixer_counts(outcome.mixers) or '-'}  "
        f"{len(outcome.warnings)} warnings  {outcome.seconds:5.1f} s",
        flush=True,
    )
    if outcome.text:
        print(f"          {outcome.text[:600]}", flush=True)


def record() -> dict[str, Any]:
    """Read what was recorded; return {} before the first run."""
    known: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return known


def write(found: list[Outcome], about: dict[str, Any]) -> None:
    """Write the record and the page; other cases and settings stay in them."""
    by_run = {_run(row): row for row in record().get("runs", ())}
    by_run |= {_run(row): row for row in (outcome.as_json() for outcome in found)}
    planned_runs = {
        (name, json.dumps(setting.as_json()))
        for name, case in CASES.items()
        for setting in settings(case)
    }
    runs = [row for run, row in by_run.items() if run in planned_runs]
    order = list(CASES)
    runs.sort(key=lambda row: order.index(row["case"]))  # stable
    note_load(about)
    lines = ",\n  ".join(json.dumps(row) for row in runs)
    replace(RECORD, f'{{"setup": {json.dumps(about)},\n "runs": [\n  {lines}\n ]}}\n')
    replace(PAGE, markdown({"setup": about, "runs": runs}))


def _run(row: dict[str, Any]) -> tuple[str, str]:
    return row["case"], json.dumps(row["setting"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["sweep"]:
        sys.exit(sweep.main(sys.argv[2:]))
    if sys.argv[1:2] == ["operators"]:
        sys.exit(operators.main(sys.argv[2:]))
    sys.exit(main())
