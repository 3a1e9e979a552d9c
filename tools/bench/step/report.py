"""Write the tables of steps: speed and memory, the target, shares of the time."""

from __future__ import annotations

import statistics
from typing import Any

from tools.bench.step.models import ABOUT
from tools.bench.step.shares import SHARES
from tools.results import at_least, busy_note, markdown_table, setup_text

ONE, OURS = "one thread", "cp"
SPEED = 1.85  # of one thread, at TOKENS
TOKENS = 8192


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    setup = record["setup"]
    packages = ", ".join(f"{k} {v}" for k, v in setup["packages"].items())
    lines = [
        "# A training step, and its peers",
        "",
        f"Forward, backward and AdamW of one sequence of {setup['tokens']:,} tokens, "
        f"float32; {setup_text(setup)}; other packages: {packages or 'none'}. "
        f"{setup['rounds']} steps of each way in turns, medians. one thread, all "
        "threads: one process, Inductor. cp: this package, ranks of one thread. torch "
        "context_parallel: eager. transformers gives a compiled Llama a dense causal "
        "mask, which cp recognises; one process and AutoSP compute what it hides. "
        "Printed by `tools/in_venv python -m tools.bench step`.",
        "",
        *busy_note(setup),
    ]
    for run in record["models"]:
        lines += [f"## {ABOUT[run['model']]}", ""]
        lines += speeds(run, setup["tokens"])
        if run["left_out"]:
            rows = [[x["way"], x["reason"]] for x in run["left_out"]]
            lines += ["", *markdown_table(["left out", "reason"], rows)]
        lines += ["", *shares_table(run), ""]
    lines += ["## Against the target", "", *targets(record)]
    return "\n".join([*lines, ""])


def seconds(run: dict[str, Any], way: str) -> float:
    """Return the seconds of the median step."""
    return statistics.median(each[way]["seconds"] for each in run["rounds"])


def ratio(run: dict[str, Any], way: str) -> float:
    """Return the speed over that of one thread: the median of the rounds' ratios."""
    return statistics.median(
        each[ONE]["seconds"] / each[way]["seconds"] for each in run["rounds"]
    )


def speeds(run: dict[str, Any], tokens: int) -> list[str]:
    """Return a line for each way."""
    rows = []
    for about in run["about"]:
        way = about["way"]
        used = processor_seconds(run, way)
        main = processor_seconds(run, way, "main")
        rows.append(
            [
                way,
                f"{about['processes']} x {about['threads']}",
                f"{seconds(run, way):.2f}",
                f"{tokens / seconds(run, way):.0f}",
                f"{ratio(run, way):.2f}",
                f"{about['growth'] / 2**20:.0f}",
                f"{used:.2f}",
                f"{main:.2f}",
            ]
        )
    head = ["way", "processes x threads", "s per step", "tokens/s", "to one thread"]
    head += ["MiB", "processor s", "of the main thread"]
    held = run["about"][0]["parameters"] / 2**20
    return [
        f"MiB: what the largest process grows by in a step, gradients included, beside "
        f"{held:.0f} MiB of parameters and twice as much of AdamW's state. Processor "
        "seconds of the process that uses most.",
        "",
        *markdown_table(head, rows),
    ]


def shares_table(run: dict[str, Any]) -> list[str]:
    """Tabulate seconds and parts of a step, and what a rank takes beyond its part."""
    known = {x["way"]: x["shares"] for x in run["about"] if "shares" in x}
    ranks = {x["way"]: x["processes"] for x in run["about"]}[OURS]
    rows = []
    for share in SHARES:
        row = [share]
        for found in known.values():
            part = found[share] / sum(found.values())
            row.append(f"{found[share]:.2f} ({part:.0%})")
        row.append(f"{known[OURS][share] - known[ONE][share] / ranks:+.2f}")
        rows.append(row)
    totals = [sum(found.values()) for found in known.values()]
    more = sum(known[OURS].values()) - sum(known[ONE].values()) / ranks
    rows.append(["together", *(f"{x:.2f}" for x in totals), f"{more:+.2f}"])
    head = ["s of a step, recorded", *known, f"cp over 1/{ranks} of one thread"]
    return [
        "Of one recorded step, the mean of the ranks. Messages of attention count as "
        "waits, where a rank does nothing else; gradient reduction is copying, sums, "
        "and waits for them.",
        "",
        *markdown_table(head, rows),
    ]


def targets(record: dict[str, Any]) -> list[str]:
    """Compare the speed of each model with the target."""
    tokens = record["setup"]["tokens"]
    if tokens != TOKENS:
        return [f"It is for {TOKENS:,} tokens."]
    rows = []
    for run in record["models"]:
        used = processor_seconds(run, ONE) / processor_seconds(run, OURS)
        row = at_least("tokens/s of cp / one thread", ratio(run, OURS), SPEED)
        fastest = fastest_step(run, ONE) / fastest_step(run, OURS)
        rows.append([run["model"], *row, f"{fastest:.2f}", f"{used:.2f}"])
    head = ["model", "ratio", "target", "got", "verdict"]
    head += ["of the fastest steps", "of processor s"]
    return [
        "The last columns are ratios of the fastest step of each, and of the processor "
        "time of one thread to that of a rank. If other processes take the cores too, "
        "a rank waits for them and for the other rank, which the medians show.",
        "",
        *markdown_table(head, rows),
    ]


def fastest_step(run: dict[str, Any], way: str) -> float:
    """Return the seconds of the round that was disturbed least."""
    return min(each[way]["seconds"] for each in run["rounds"])


def processor_seconds(run: dict[str, Any], way: str, what: str = "processor") -> float:
    """Return the seconds of the process that uses most, the median of the rounds."""
    return statistics.median(max(each[way][what]) for each in run["rounds"])
