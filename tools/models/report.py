"""The page of the models: a row per case, a note per thing that was refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.models.outcome import Outcome, Verdict
from tests.models.plan import settings
from tests.models.setting import Mode
from tests.models.zoo import CASES, FAMILIES
from tools.models import versions as versions_report
from tools.results import RESULTS, ROOT, markdown_table

PAGE = ROOT / "docs" / "compatibility.md"
RECORD = RESULTS / "compatibility.json"

# Kind -> which runs of a case it sums up; each run is in the first that takes it.
COLUMNS: dict[str, Callable[[Outcome], bool]] = {
    "nothing named": lambda o: not o.setting.annotated,
    "4 ranks": lambda o: o.setting.world >= 4 and o.setting.length is None,
    "inductor": lambda o: o.setting.inner == "inductor",
    "other shapes": lambda o: o.setting.length is not None,
    "strategies": lambda o: (
        (o.setting.strategy, o.setting.layout, o.setting.mixers) != ("auto",) * 3
    ),
    "train": lambda o: o.setting.mode is Mode.TRAIN,
    "eval": lambda o: o.setting.mode is Mode.EVAL,
    "calls": lambda o: o.setting.mode is Mode.CALLS,
}
ORDER = (
    *("train", "eval", "calls", "strategies", "4 ranks", "other shapes"),
    *("nothing named", "inductor"),
)
_GATHERED = re.compile(r"^(\S+) at .* runs on gathered tensors")
_INTRODUCTION = """\
# Compatibility

Real models, unmodified, with random weights, under `torch.compile(model, backend="cp")`
on CPU ranks. Every result and every parameter's gradient is compared with the same
model on one process, at all positions, including padding. The reference is float64; an
error may be four times that of float32 on one process, with torch's fused attention or
its plain one, plus four roundings of a tensor's largest value. Written by
`tools/in_venv python -m tools.models --write`: {versions}; {processor}, {date}.

- model: the name in `tests/models`, and the kind of call: `default` is the library's
  own default (causal language models make a key/value cache), `padded` has an attention
  mask with padding on both sides, `packed` has two documents in a row.
- attention: attention calls (`scaled_dot_product_attention`, or written by hand) in one
  training step that run sharded, of all that there are. One whose weights are returned
  runs by rows of queries, and a warning names it, as it does one that stays. mixers:
  what mixes tokens by other means, known functions or parts of the graph, in a step
  that forces each way to share it: so many of all that there are. A short convolution
  needs a few tokens of the rank before, and is not counted. "-": there is none.
- runs: "exact" if all of the following kinds are; others are named.
- train: one step on 2 ranks, strategy auto. eval: a forward under `torch.no_grad()`.
- calls: two steps whose gradients add up, the second with other values, masks and
  length, then a forward in eval mode, all with one compiled model.
- strategies: a step with the contiguous layout, with ring, with both, with all_gather
  and with ulysses. 4 ranks: a step and a forward, and the same strategies; some on 8
  ranks too. Of models with sequence mixers: a step with the mixers by exchange, and one
  by states, on 2 ranks and on 4; by auto, short sequences are often gathered.
- other shapes: another length, and for some models fewer tokens than ranks, as many
  sequences as tokens, or four sequences.
- nothing named: a step with only `options={{"mesh": mesh}}`.
- inductor: a training step with the default inner compiler, for some models also a
  forward, and of models with sequence mixers for some; all other kinds use aot_eager.
- error, or the number behind a name: the largest error of all exact runs. gathered:
  calls in a training step that DTensor cannot shard, and that run on gathered tensors
  with a warning each.
- Numbers in brackets refer to the notes below.
- `small_gpt` is like nanoGPT, `min_gpt` like minGPT, `flex_decoder` like the decoders
  of torchtitan (which needs the requirements of its trainer to be imported), with
  flex_attention and a block mask that is made outside of the model.
- `flex_...`: transformers with `attn_implementation="flex_attention"`; `eager`: with
  `"eager"`, which writes attention out.
"""


def markdown(record: dict[str, Any]) -> str:
    """Return the whole page as Markdown."""
    found = [Outcome.from_json(row) for row in record["runs"]]
    setup = record["setup"]
    names = ("torch", "transformers", "timm", "diffusers", "python")
    versions = ", ".join(f"{name} {setup[name]}" for name in names)
    lines = _INTRODUCTION.format(versions=versions, **setup).splitlines()
    lines += ["", _counts(found)]
    notes: list[str] = []
    for family, cases in FAMILIES.items():
        by_case = {
            case.name: [o for o in found if o.case == case.name] for case in cases
        }
        rows = [_row(name, runs, notes) for name, runs in by_case.items() if runs]
        if rows:
            header = ("model", "attention", "mixers", "runs", "error", "gathered")
            lines += ["", f"## {family[0].upper()}{family[1:]}", ""]
            whole = [row for row in rows if _is_whole(row)]
            if whole:
                errors = ", ".join(f"{row[0]} {row[4]}" for row in whole)
                lines += [f"All shared out, and exact in every run: {errors}."]
            if others := [row for row in rows if row not in whole]:
                lines += [*([""] if whole else []), *markdown_table(header, others)]
    if notes:
        lines += ["", "## Notes", ""]
        lines += [f"{n}. {_escaped(text)}" for n, text in enumerate(notes, 1)]
    lines += ["", *versions_report.section(versions_report.read())]
    return "\n".join([*lines, ""])


def _counts(found: list[Outcome]) -> str:
    cases = {o.case for o in found}
    bad = {o.case for o in found if o.verdict is not Verdict.EXACT}
    counts = [(v, sum(o.verdict is v for o in found)) for v in Verdict]
    words = ", ".join(f"{n} {v.value}" for v, n in counts if n)
    planned = sum(len(settings(case)) for case in CASES.values())
    return (
        f"{len(cases)} of {len(CASES)} models and calls, {len(found)} of {planned} "
        f"planned runs: {words}. "
        f"In {len(cases - bad)} of them every run is exact."
    )


def _row(name: str, runs: list[Outcome], notes: list[str]) -> list[str]:
    groups: dict[str, list[Outcome]] = {column: [] for column in ORDER}
    for run in runs:
        column = next(c for c, takes in COLUMNS.items() if takes(run))
        groups[column].append(run)
    outcomes = {column: _cell(groups[column], notes) for column in ORDER}
    exact = [o.error for o in runs if o.verdict is Verdict.EXACT]
    step = next(iter(groups["train"]), None)
    attention = gathered = ""
    if step is not None and step.verdict is not Verdict.CRASH:
        attention = f"{step.sharded}/{step.attention}" if step.attention else "-"
        gathered = ", ".join(gathered_calls(step))
    if step is not None and step.verdict is Verdict.REFUSED:
        attention = ""
    error = f"{max(exact):.0e}" if exact else ""
    return [name, attention, _mixers(runs), _joined(outcomes), error, gathered]


def _is_whole(row: list[str]) -> bool:
    """Whether nothing of a row needs a table: all attention, all runs, nothing else."""
    _, attention, mixers, runs, _, gathered = row
    shared, _, calls = attention.partition("/")
    return (shared, mixers, runs, gathered) == (calls, "-", "exact", "")


def _joined(outcomes: dict[str, str]) -> str:
    """Write what came out, such as "exact; not run: inductor"."""
    groups: dict[str, list[str]] = {"exact": []}
    for column, outcome in outcomes.items():
        groups.setdefault(outcome or "not run", []).append(column)
    exact = groups.pop("exact")
    words = [f"{outcome}: {', '.join(names)}" for outcome, names in groups.items()]
    return "; ".join(["exact", *words] if exact else words)


def _mixers(runs: list[Outcome]) -> str:
    """Count the mixers that ranks share, in steps on 2 ranks that force a strategy."""
    forced = [o for o in runs if o.setting.mixers != "auto" and o.setting.world == 2]
    counts = [mixer_counts(o.mixers, o.setting.mixers) for o in forced]
    return ", ".join(filter(None, counts)) or "-"


def mixer_counts(mixers: tuple[str, ...], wanted: str = "auto") -> str:
    """Write how mixers are shared, such as "2/3 exchange"; only one way, if wanted."""
    names = dict.fromkeys(mixers) if wanted == "auto" else [wanted]
    counts = [f"{mixers.count(name)}/{len(mixers)} {name}" for name in names]
    return ", ".join(counts) if mixers else ""


def gathered_calls(run: Outcome) -> list[str]:
    """Name the calls that ran on gathered tensors, and how many there were."""
    names = [m[1] for text in run.warnings if (m := _GATHERED.match(text))]
    return [
        name if names.count(name) == 1 else f"{name} x{names.count(name)}"
        for name in dict.fromkeys(names)
    ]


def _cell(runs: list[Outcome], notes: list[str]) -> str:
    """Write a cell, such as "exact", "refused [1]", "3 exact, 1 refused [2]"."""
    counts = [(v, [o for o in runs if o.verdict is v]) for v in Verdict]
    words = []
    for verdict, some in counts:
        if not some:
            continue
        number = "" if len(some) == len(runs) else f"{len(some)} "
        texts = dict.fromkeys(_note(o) for o in some if o.text)
        marks = "".join(f" [{_numbered(text, notes)}]" for text in texts)
        loud = verdict in (Verdict.WRONG, Verdict.CRASH)
        word = f"**{verdict.value}**" if loud else verdict.value
        words.append(f"{number}{word}{marks}")
    return ", ".join(words)


def _note(run: Outcome) -> str:
    """Return the text of a run; that of a bug says where it is."""
    if run.verdict in (Verdict.WRONG, Verdict.CRASH):
        return f"{run.case}, {run.setting}: {run.text}"
    return run.text


def _numbered(text: str, notes: list[str]) -> int:
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def _escaped(text: str) -> str:
    """Escape a message, which is no Markdown."""
    return re.sub(r"([*_<>|`])", r"\\\1", text)
