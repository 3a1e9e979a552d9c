"""Run every family of some libraries, each very small, on two CPU ranks.

Kinds are tasks of transformers, the transformers of diffusers, and the modules of timm
that have attention; a library that is not installed is named, and left out. A training
step of each, and a forward in eval mode after it, are compared with one process, as the
cases of the table of compatibility are; see tests/models/families/automatic.py for how
configurations are made. What torch alone cannot run or compile is told apart. Prints a
line per family as it goes; --write records each at once, so that a run that is cut off
goes on with the families that have no record (--again runs all, and says where they
differ from it).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace as replaced
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tests.cpu.workers import Pools, ProcessFailedError, ProcessTimeoutError
from tests.models.families.automatic import (
    KINDS,
    PREFIX,
    NoConfigurationError,
    automatic_case,
    families,
    library_divides,
)
from tests.models.outcome import Verdict, reference
from tests.models.run_case import run_case, short
from tests.models.setting import Mode, Setting
from tests.models.steps import make_model, run_steps
from tools.results import RESULTS, ROOT, markdown_table, note_load, replace, setup

PAGE = ROOT / "docs" / "families.md"
RECORD = RESULTS / "families.json"
README = ROOT / "README.md"
_TABLE = (
    "<!-- families, written by tools/in_venv python -m tools.models sweep --write -->"
)
_END = "<!-- end of families -->"
_NAMES = {
    "causal": "causal language models of transformers, hybrids and mixers too",
    "masked": "masked language models of transformers",
    "seq2seq": "encoders with decoders of transformers",
    "images": "image classifiers of transformers, convolutional ones too",
    "diffusers": "image, video and audio transformers of diffusers",
    "timm": "modules of timm that have attention",
}
SECONDS = 240.0  # for one family
NO_CONFIGURATION, NO_TORCH = "no configuration", "not by torch"
DIVIDED = "divided by library"  # of a row: what it claims, or nothing
LIBRARIES = ("transformers", "diffusers", "timm")
_EVERY = 40  # families, after which processes are started anew
_LIKE = 0.03  # part by which work may differ
_LEAST_WORK = 1.2  # of all ranks over one device's, up to which it is shared out


def main(arguments: list[str]) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m tools.models sweep", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--families", nargs="*", metavar="NAME", help="whole names or their beginnings"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each")
    parser.add_argument("--minutes", type=float, default=None, help="for all of them")
    parser.add_argument("--again", action="store_true", help="what has a record, too")
    parser.add_argument("--write", action="store_true", help="write docs/")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    known = {row["case"]: row for row in record().get("runs", ())}
    rows = dict(known)
    names = [
        f"{PREFIX}{kind}/{family}"
        for kind in options.kinds
        for family in _installed(kind)
        if not options.families or any(family.startswith(x) for x in options.families)
    ]
    if not options.again:
        names = [name for name in names if name not in rows]
    about = setup(**{library: _version(library) for library in LIBRARIES})
    pools, started = Pools(), time.monotonic()
    found = []
    try:
        for number, name in enumerate(names, 1):
            if options.minutes and time.monotonic() - started > 60 * options.minutes:
                break
            row = rows[name] = tried(pools, name, options.seconds)
            if row["verdict"] != NO_CONFIGURATION:
                row[DIVIDED] = library_divides(name)
            found.append(row)
            _show(number, len(names), row)
            _compare(row, known.get(name))
            if options.write:
                write(rows, about)
            if number % _EVERY == 0:
                pools.close()
    finally:
        pools.close()
    print(_counts(found))
    bugs = (Verdict.WRONG.value, Verdict.CRASH.value)
    return int(any(row["verdict"] in bugs for row in found))


def _installed(kind: str) -> list[str]:
    """Families of a kind; none, and the missing package is named."""
    try:
        return families(kind)
    except ModuleNotFoundError as error:
        print(f"{kind}: {error.name} is not installed", file=sys.stderr)
        return []


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def tried(pools: Pools, name: str, seconds: float) -> dict[str, Any]:
    """Run one family; return what came of it, as the record has it."""
    try:
        automatic_case(name)
    except NoConfigurationError as error:
        return {"case": name, "verdict": NO_CONFIGURATION, "text": short(str(error))}
    setting = Setting(mode=Mode.BOTH, annotated=False)
    try:
        reference(name, Setting(mode=setting.mode))
    except Exception as error:  # whatever a model raises on one process
        text = short(f"{type(error).__name__}: {error}")
        return {"case": name, "verdict": NO_TORCH, "text": f"one process: {text}"}
    outcome = run_case(pools, name, setting, seconds)
    row = outcome.as_json()
    if outcome.verdict is Verdict.WRONG:  # or a sum that float32 rounds badly
        exactly = run_case(pools, name, replaced(setting, double=True), seconds)
        if exactly.verdict is Verdict.EXACT:
            text = f"in float64 {exactly.error:.0e}; in float32 {outcome.text}"
            row |= {"verdict": exactly.verdict.value, "text": text}
            row["error"] = float(f"{exactly.error:.1e}")
        else:
            row["text"] = f"in float64: {exactly.text}"
    if outcome.verdict in (Verdict.REFUSED, Verdict.CRASH):
        problem = _without_us(pools, name, seconds)
        if problem is not None:
            return {"case": name, "verdict": NO_TORCH, "text": problem}
    del row["setting"]
    row["gathered"] = outcome.gathered  # also where it is 0
    return row


def _without_us(pools: Pools, name: str, seconds: float) -> str | None:
    """Return what fails where torch compiles the model alone, or None."""
    try:
        (text,) = pools[1].run(compile_alone, name, timeout=seconds)
    except (ProcessFailedError, ProcessTimeoutError) as error:
        pools.close()
        return f"aot_eager: {short(str(error).strip().splitlines()[-1])}"
    return None if text is None else f"aot_eager: {text}"


def compile_alone(name: str) -> str | None:
    """Train the model by torch.compile's aot_eager; return an error as a text."""
    torch._dynamo.reset()
    case = automatic_case(name)
    model = make_model(case)
    try:
        step = torch.compile(model, backend="aot_eager")
        run_steps(case, Setting(mode=Mode.BOTH), model, step)
    except Exception as error:  # whatever torch raises
        return short(f"{type(error).__name__}: {error}")[:400]
    return None


def _show(number: int, total: int, row: dict[str, Any]) -> None:
    attention = f"{row.get('sharded', 0)}/{row.get('attention', 0)} attention"
    print(
        f"{number:4}/{total} {row['case'].removeprefix(PREFIX):34} "
        f"{row['verdict']:16} {row.get('error', 0.0):8.1e}  {attention}  "
        f"work {row.get('work', 0.0):4.2f}  {len(row.get('warnings', ()))} warnings",
        flush=True,
    )
    if row.get("text"):
        print(f"          {row['text'][:400]}", flush=True)


def _compare(row: dict[str, Any], known: dict[str, Any] | None) -> None:
    """Print where a row differs from that of the record."""
    if known is None:
        return
    said = []
    for name in ("verdict", "sharded", "work", "gathered", "warnings"):
        now, then = row.get(name, 0), known.get(name, 0)
        if name == "warnings":
            now, then = len(now or ()), len(then or ())
        more = isinstance(now, float) and abs(now - then) <= _LIKE * then
        if now != then and not more:
            said.append(f"{name} {now}, was {then}")
    if row.get("error", 0.0) > 3 * known.get("error", 0.0) + 1e-6:
        said.append(f"error {row['error']:.0e}, was {known.get('error', 0.0):.0e}")
    if said:
        print(f"          differs: {'; '.join(said)}", flush=True)


def record() -> dict[str, Any]:
    """Read what was recorded; return {} before the first run."""
    known: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return known


def write(rows: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
    """Write the record and the page."""
    note_load(about)
    runs = [rows[name] for name in sorted(rows)]
    lines = ",\n  ".join(json.dumps(row) for row in runs)
    text = f'{{"setup": {json.dumps(about)},\n "runs": [\n  {lines}\n ]}}\n'
    replace(RECORD, text)
    replace(PAGE, markdown({"setup": about, "runs": runs}))
    first, rest = README.read_text().split(_TABLE)
    last = rest[rest.index(_END) :]
    replace(README, "\n".join([f"{first}{_TABLE}", "", *summary(runs), "", last]))


_INTRODUCTION = """\
# Families of transformers, diffusers and timm

Every family that the installed transformers has for a task, every transformer of
diffusers, and a model of every module of timm that has attention, in the smallest
configuration that can be made from the names of its fields
(`tests/models/families/automatic.py`): one training step and then a forward in eval
mode on 2 CPU ranks with only `options={{"mesh": mesh}}`, compared with one process as
in [compatibility](compatibility.md). Written by
`tools/in_venv python -m tools.models sweep --write`: torch {torch}, transformers
{transformers}, diffusers {diffusers}, timm {timm}, {processor}, {date}.

- exact: every result and gradient equals one process; where a tensor in float32 is out
  of bounds, all of it in float64. refused: cpcompile says that it cannot, and why.
  wrong, crash: bugs.
- shared: the exact ones in which all ranks together do at most {least} times the work
  of one device.
- not by torch: the model does not run on one process with these sizes, or
  `backend="aot_eager"` alone fails.
- no configuration: the sizes do not fit, the class makes parts of other sizes, or
  names do not say what its inputs are.
- divided by library: the exact ones whose library claims to divide their sequences,
  too: a `_cp_plan` of the class in diffusers, and in transformers
  `supports_context_parallel`, which is the default, and false only of windows, chunks,
  sinks and states: encoders have it, though they are no causal attention. timm has
  nothing of the kind.

The table of all that are exact, with errors, work and bytes, is at the end of this page
where `tools/docs` builds it, and in [the record](results/families.json).
"""


def markdown(found: dict[str, Any]) -> str:
    """Return the whole page as Markdown."""
    rows, about = found["runs"], found["setup"]
    lines = _INTRODUCTION.format(least=_LEAST_WORK, **about).splitlines()
    verdicts = [*(v.value for v in Verdict), NO_TORCH, NO_CONFIGURATION]
    table = []
    for kind in KINDS:
        of_kind = [x for x in rows if x["case"].startswith(f"{PREFIX}{kind}/")]
        counts = Counter(x["verdict"] for x in of_kind)
        exact = [x for x in of_kind if x["verdict"] == Verdict.EXACT.value]
        shared = sum(x.get("work", 0.0) <= _LEAST_WORK for x in exact)
        divided = sum(bool(x.get(DIVIDED)) for x in exact)
        cells = [counts[v] for v in verdicts]
        tried_of_all = f"{len(of_kind)}/{max(len(of_kind), len(_installed(kind)))}"
        table.append([kind, tried_of_all, cells[0], shared, *cells[1:], divided])
    header = ["kind", "tried", verdicts[0], "shared", *verdicts[1:], DIVIDED]
    lines += ["", *markdown_table(header, table), "", *_claims(rows), *_older(rows)]
    for title, chosen in (
        ("Not exact", (Verdict.REFUSED, Verdict.WRONG, Verdict.CRASH)),
        ("Not by torch", (NO_TORCH,)),
        ("No configuration", (NO_CONFIGURATION,)),
    ):
        words = [getattr(v, "value", v) for v in chosen]
        listed = [x for x in rows if x["verdict"] in words]
        if listed:
            lines += ["", f"## {title}", ""]
            lines += [f"- {_named(x)}: {_escaped(x.get('text', ''))}" for x in listed]
    much = [x for x in rows if x.get("work", 0.0) > _LEAST_WORK]
    if much:
        lines += ["", "## Work that is repeated", ""]
        lines += [f"- {_named(x)}: {x['work']:.2f} times one device's" for x in much]
    return "\n".join([*lines, ""])


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of the README: a row for each kind."""
    table = []
    for kind in KINDS:
        of_kind = [x for x in rows if x["case"].startswith(f"{PREFIX}{kind}/")]
        tried = [x for x in of_kind if x["verdict"] not in (NO_TORCH, NO_CONFIGURATION)]
        exact = [x for x in tried if x["verdict"] == Verdict.EXACT.value]
        work = [x.get("work", 0.0) for x in exact]
        shared = sum(x <= _LEAST_WORK for x in work)
        divided = sum(bool(x.get(DIVIDED)) for x in exact)
        median = f"{statistics.median(work):.2f}" if work else ""
        counts = (f"{len(exact)} of {len(tried)}", f"{shared}", median, f"{divided}")
        table.append([_NAMES[kind], *counts])
    least = f"work up to {_LEAST_WORK}"
    return markdown_table(
        ["families", "exact", least, "median", "by the library"], table
    )


def _claims(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines on what libraries claim of the families that are exact."""
    exact = [x for x in rows if x["verdict"] == Verdict.EXACT.value]
    asked = [x for x in exact if x.get(DIVIDED) is not None]
    divided = sum(x[DIVIDED] for x in asked)
    return [f"Of {len(asked)} exact families, the library claims to divide {divided}."]


def _older(rows: list[dict[str, Any]]) -> list[str]:
    """Say which rows are of a training step alone, from before forwards were run."""
    exact = [x for x in rows if x["verdict"] == Verdict.EXACT.value]
    count = sum("gathered" not in x for x in exact)
    if not count:
        return []
    return [
        "",
        f"{count} of them are of a training step alone: they were recorded before "
        "forwards",
        "were run and gathered bytes counted, and have none under gathered.",
    ]


def _named(row: dict[str, Any]) -> str:
    return f"{row['case'].removeprefix(PREFIX)} ({row['verdict']})"


def _escaped(text: str) -> str:
    return text[:120].replace("<", "\\<").replace("|", "\\|").replace("*", "\\*")


def _counts(found: list[dict[str, Any]]) -> str:
    counts = Counter(row["verdict"] for row in found)
    return f"{len(found)} families: " + ", ".join(f"{n} {v}" for v, n in counts.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
