"""Run torch's own samples of every operator, each dimension cut over two ranks.

Results and gradients of each sample of `op_db` are compared with one process; see
tests/models/operator_samples.py. The first sample of every operator comes first, then
the second one of every operator, and so on: a run that ends early has met all of them.
Samples of the same call and the same kinds of sizes count once. Each result is kept in
a file of build/ as it comes, and a later run goes on from there. --write brings
docs/results/operators.json up to date.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.cpu.workers import Pools, ProcessFailedError, ProcessTimeoutError
from tests.models.operator_samples import (
    BUGS,
    CutSample,
    SampleAnswer,
    SampleVerdict,
    distinct,
    dtypes_of,
    in_step,
    joined,
    operators,
    run_on_rank,
)
from tests.models.run_case import short
from tools.results import RESULTS, ROOT, note_load, replace, setup

RECORD = RESULTS / "operators.json"
WORK = ROOT / "build" / f"operators-{torch.__version__}.jsonl"
SAMPLES = 8  # of each operator
SECONDS = 60.0  # for one case
_EVERY = 400  # cases, after which processes are started anew
_SLOWEST = 12

Row = dict[str, Any]


def main(arguments: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.models operators", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="of operators, or their beginnings")
    parser.add_argument(
        "--cases", nargs="*", help="as the record has them; none to write alone"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each operator")
    parser.add_argument("--round", type=int, help="this sample of each alone, from 1")
    parser.add_argument("--dtype", help="instead of the first one of each operator")
    parser.add_argument("--seconds", type=float, help="for all of them")
    parser.add_argument(
        "--again",
        nargs="*",
        choices=[x.value for x in SampleVerdict],
        help="what has a result, too; or those with these verdicts alone",
    )
    parser.add_argument("--work", type=Path, default=WORK, help="file of results")
    parser.add_argument("--write", action="store_true", help="write docs/")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = recorded(options.work)
    if options.cases is not None:
        plan = [CutSample.of(text) for text in options.cases]
    else:
        rounds = [options.round] if options.round else range(1, options.samples + 1)
        plan = list(planned(options.names, rounds, options.dtype))
        plan = remaining(plan, rows, options.again)
    about = setup()
    options.work.parent.mkdir(parents=True, exist_ok=True)
    started, news = time.monotonic(), []
    with options.work.open("a") as file:
        for number, (case, answer) in enumerate(answers(plan), 1):
            row = as_row(case, answer)
            print(json.dumps(row), file=file, flush=True)
            rows[row["case"]] = row
            news.append(row)
            show(number, len(plan), row)
            if options.seconds and time.monotonic() - started > options.seconds:
                break
    if options.write:
        known = {CutSample.of(case).operator for case in rows}
        lost = [x["operator"] for x in json.loads(RECORD.read_text())["rows"]]
        if lost := sorted({*lost} - known):
            parser.error(
                f"--write would drop {len(lost)} operators of the record, such as "
                f"{lost[0]}: {options.work} has no result of them; run them first"
            )
        note_load(about)
        replace(RECORD, written(about, rows.values()))
    summary(news)
    return int(any(SampleVerdict(row["verdict"]) in BUGS for row in news))


def planned(
    names: Sequence[str], rounds: Iterable[int], dtype: str | None = None
) -> Iterator[CutSample]:
    """Yield the cases, round by round; in each, like inputs are cut together first."""
    rounds = list(rounds)
    samples: dict[tuple[str, str], list[tuple[int, list[Any]]]] = {}
    for name in operators():
        if names and not any(name.startswith(x) for x in names):
            continue
        for kind in dtypes_of(name) if dtype else dtypes_of(name)[:1]:
            if dtype in (None, kind):
                samples[name, kind] = [
                    (number, list(program.cuts()))
                    for number, program in islice(distinct(name, kind), max(rounds))
                ]
    for number in rounds:
        later = []
        for (name, kind), all_samples in samples.items():
            for sample, cuts in all_samples[number - 1 : number]:
                for cut in cuts:
                    case = CutSample(name, kind, sample, cut)
                    if cut[0][0] == cuts[0][0][0] and len(cut) == len(cuts[0]):
                        yield case
                    else:
                        later.append(case)
        yield from later


def remaining(
    plan: Iterable[CutSample], rows: Mapping[str, Row], again: Sequence[str] | None
) -> list[CutSample]:
    """Leave out what has a result, but for the verdicts to be run again."""
    if again is not None and not again:
        return list(plan)
    if again:
        return [x for x in plan if str(x) in rows and rows[str(x)]["verdict"] in again]
    return [x for x in plan if str(x) not in rows]


def answers(plan: Iterable[CutSample]) -> Iterator[tuple[CutSample, SampleAnswer]]:
    """Run cases on processes that are kept; what a case does to them ends with it."""
    pools = Pools()
    try:
        for number, case in enumerate(plan, 1):
            yield case, answered(pools, case)
            if number % _EVERY == 0:
                pools.close()
    finally:
        pools.close()


def answered(pools: Pools, case: CutSample, seconds: float = SECONDS) -> SampleAnswer:
    """Run one case on two ranks; never raises for what the case does."""
    try:
        answer = joined(pools[2].run(run_on_rank, case, timeout=seconds))
    except (ProcessFailedError, ProcessTimeoutError) as error:
        lines = str(error).strip().splitlines()
        text = short(" ... ".join(dict.fromkeys([lines[0], lines[-1]])))
        return SampleAnswer(SampleVerdict.CRASH, text)
    if answer.verdict is SampleVerdict.CRASH:
        _only_in_step(pools)
    return answer


def _only_in_step(pools: Pools) -> None:
    """End processes of which one may still be inside of a collective."""
    try:
        if not all(pools[2].run(in_step, timeout=5.0)):
            pools.close()
    except (ProcessFailedError, ProcessTimeoutError):
        pools.close()


def as_row(case: CutSample, answer: SampleAnswer) -> Row:
    """Return plain data, for a line of the file."""
    row = {"case": str(case), "verdict": answer.verdict.value}
    if answer.verdict is not SampleVerdict.EXACT:
        row |= {"text": answer.text, "call": answer.call}
    return row | {"seconds": round(answer.seconds, 2), "graphs": answer.graphs}


def recorded(path: Path) -> dict[str, Row]:
    """Read the results of former runs; the last one of a case counts."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # of a run that was killed while it wrote
            continue
        rows[row["case"]] = row
    return rows


def show(number: int, total: int, row: Row) -> None:
    """Print a line, and under it what is not exact."""
    print(
        f"{number:5}/{total} {row['case']:60} {row['verdict']:8} "
        f"{row['seconds']:5.1f} s",
        flush=True,
    )
    if row.get("text") and row["verdict"] != SampleVerdict.GATHERED.value:
        print(f"            {row['call']}: {row['text'][:300]}", flush=True)


def summary(rows: Sequence[Row]) -> None:
    """Print counts, and the slowest cases."""
    counts = Counter(row["verdict"] for row in rows)
    words = ", ".join(f"{counts[v.value]} {v.value}" for v in SampleVerdict)
    print(f"{len(rows)} cases: {words}")
    for row in slowest(rows):
        print(f"{row['seconds']:6.1f} s {row['case']}")


def slowest(rows: Iterable[Row]) -> list[Row]:
    """Return the cases whose compilation took longest, one of each operator."""
    by_operator: dict[str, Row] = {}
    for row in rows:
        name = CutSample.of(row["case"]).operator
        if name not in by_operator or by_operator[name]["seconds"] < row["seconds"]:
            by_operator[name] = row
    order = sorted(by_operator.values(), key=lambda row: -row["seconds"])
    return order[:_SLOWEST]


def written(about: Row, rows: Iterable[Row]) -> str:
    """Return the record: a line per operator, with what is not exact by its texts."""
    rows = list(rows)
    counts = Counter(row["verdict"] for row in rows)
    by_operator: dict[str, list[Row]] = {}
    for row in rows:
        by_operator.setdefault(CutSample.of(row["case"]).operator, []).append(row)
    lines = [json.dumps(of_operator(n, by_operator[n])) for n in sorted(by_operator)]
    head = {
        "setup": about,
        "cases": len(rows),
        "operators": len(by_operator),
        "counts": {v.value: counts[v.value] for v in SampleVerdict},
        "slowest": {row["case"]: row["seconds"] for row in slowest(rows)},
    }
    text = json.dumps(head, indent=1).removesuffix("\n}")
    rows_text = ",\n  ".join(lines)
    return f'{text},\n "rows": [\n  {rows_text}\n ]\n}}\n'


def of_operator(name: str, rows: Sequence[Row]) -> Row:
    """Return the counts of one operator, and each text with its first case."""
    counts = Counter(row["verdict"] for row in rows)
    texts: dict[tuple[str, str], Row] = {}
    for row in rows:
        if not row.get("text"):
            continue
        key = (row["verdict"], row["text"])
        entry = texts.setdefault(
            key,
            {
                "verdict": row["verdict"],
                "case": row["case"].removeprefix(f"{name}/"),
                "call": row["call"],
                "text": row["text"][:200],
                "cases": 0,
            },
        )
        entry["cases"] += 1
    present = {v.value: counts[v.value] for v in SampleVerdict if counts[v.value]}
    more = {"texts": list(texts.values())} if texts else {}
    return {"operator": name, **present, **more}
