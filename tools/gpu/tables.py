"""Write the GPU report as Markdown: targets, then all sections with what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.gpu.targets import targets
from tools.results import markdown_table, setup_text

Rows = Sequence[Mapping[str, Any]]

MOST_TRACEBACK_LINES = 12  # all of it is in the JSON
PARTS = ("dkdv", "dkdv_acc", "dq", "dq_acc")
KERNELS = ("attention_step", "attention_step_dkdv", "attention_step_dq")


def markdown(record: Mapping[str, Any]) -> str:
    """Write the whole report; `record` is what the JSON holds."""
    setup = record["setup"]
    lines = [
        "# Step kernels on one GPU",
        "",
        f"{setup['device']}, driver {setup['driver']}; triton {setup['triton']}, CUDA "
        f"{setup['cuda']}, cuDNN {setup['cudnn']}; {setup_text(setup)}; "
        f"`{setup['command']}`, {setup['seconds']:.0f} s"
        f"{completed_by(setup)}.",
        "",
        "TFLOP/s count 4 operations per visible (query, key) pair and head dim forward "
        "and 2.5 times as many backward. Times are of the GPU, medians of calls that "
        "took turns in one process.",
        "",
        "## Targets",
        "",
        *targets_table(record),
        "",
    ]
    for key, section in record["sections"].items():
        lines += [f"## {key}. {section['title']}", "", *section_lines(key, section)]
    return "\n".join(lines)


def completed_by(setup: Mapping[str, Any]) -> str:
    """Say which rows another run gave, if any did."""
    return f"; {setup['completed_by']}" if "completed_by" in setup else ""


def targets_table(record: Mapping[str, Any]) -> list[str]:
    """Tabulate the targets: met or missed, and by how much."""
    rows = {key: section["rows"] for key, section in record["sections"].items()}
    return markdown_table(
        ["target", "needed", "got", "verdict"],
        [
            [t.name, f">= {t.needed:g}", number(t.got, 3), t.verdict]
            for t in targets(rows)
        ],
    )


def section_lines(key: str, section: Mapping[str, Any]) -> list[str]:
    """Return tables, errors and what was not run."""
    rows = section["rows"]
    lines: list[str] = []
    if section["seconds"] is not None:
        lines += [f"{section['seconds']:.0f} s.", ""]
    measured = [row for row in rows if set(row) != {"item", "error"}]
    if measured:
        lines += [*TABLES[key](measured), ""]
    lines += errors(rows)
    if section["not_run"]:
        lines += [f"Not run ({len(section['not_run'])}): {section['why_not_run']}.", ""]
        lines += [f"- {item}" for item in section["not_run"]] + [""]
    return lines


def errors(rows: Rows) -> list[str]:
    """Return the end of each traceback; what single peers could not do, once."""
    lines: list[str] = []
    peers: dict[str, list[str]] = {}
    for row in rows:
        if "error" in row:
            end = str(row["error"]).strip().splitlines()[-MOST_TRACEBACK_LINES:]
            lines += [f"Error in {row['item']}:", "", "```", *end, "```", ""]
        for name, error in row.get("errors", {}).items():
            first = str(error).splitlines()[0][:200]
            peers.setdefault(f"{name}: {first}", []).append(str(row["item"]))
    return [
        *(f"- {error} ({', '.join(dict.fromkeys(x))})" for error, x in peers.items()),
        *([""] if peers else []),
        *lines,
    ]


def correctness_table(rows: Rows) -> list[str]:
    """Tabulate the worst ratio of the results of each kernel, per case."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        ratios = row["ratios"].values()
        worst = next((x for x in ratios if isinstance(x, str)), None)
        cell = worst or f"{max(ratios):.2f}"
        cell += "" if row["passed"] else " FAILED"
        found.setdefault(row["case"], {})[row["kernel"]] = cell
    failed = sum(not row["passed"] for row in rows)
    return [
        "Error over that of the same dtype by math, see tools/gpu/reference.py; up to "
        f"2 passes. {len(rows)} results, {failed} failed.",
        "",
        *markdown_table(
            ["case", *KERNELS],
            [[case, *(x.get(k, "") for k in KERNELS)] for case, x in found.items()],
        ),
    ]


def rates_table(rows: Rows) -> list[str]:
    """Tabulate forward, then backward; ratios above 1 are ours being faster."""
    lines: list[str] = []
    for direction, own, names in (
        ("forward", "step", ("step", "step_acc")),
        ("backward", "backward", ("backward", "backward_acc")),
    ):
        peers = ("flash", "cudnn", "flex")
        parts = PARTS if direction == "backward" else ()
        body = []
        for row in rows:
            if row["direction"] != direction:
                continue
            rate = row["tflops"]
            ratios = [_ratio(rate.get(own), rate.get(peer)) for peer in peers]
            body.append(
                [
                    str(row["item"]),
                    *(number(rate.get(x), 0) for x in (*names, *peers)),
                    *(number(x, 2) for x in ratios),
                    *(number(rate.get(x), 0) for x in parts),
                    *([number(row["ms"].get("delta"), 3)] if parts else []),
                ]
            )
        head = [
            *(f"{direction}, TFLOP/s", *names, *peers),
            *(f"{own} / {peer}" for peer in peers),
            *(*parts, *(["delta ms"] if parts else [])),
        ]
        lines += [*markdown_table(head, body), ""]
    spread = max((x for row in rows for x in row["spread"].values()), default=0.0)
    return [
        *lines,
        f"The middle half of the samples of a time differs by {spread:.1%} at most; "
        "backward is dkdv and dq one after the other, for 2.5 times the forward; alone "
        "they count what they compute, 2 and 1.5 times, as both need the scores. "
        "delta, in eager torch here, is part of the peers' backward but not of ours.",
    ]


def configs_table(rows: Rows) -> list[str]:
    """Tabulate TFLOP/s of what each kernel does: dkdv 2, dq 1.5 times the forward."""
    body = []
    for row in rows:
        marks = [name for name in ("default", "best") if row[name]]
        body.append(
            [
                str(row["item"]),
                " ".join(str(x) for x in row["config"].values()),
                number(row["full"], 0),
                number(row["causal"], 0),
                ", ".join(marks),
                str(row.get("error", "")).splitlines()[0] if "error" in row else "",
            ]
        )
    head = ["kernel", "M N warps stages", "full", "causal", "", "error"]
    return markdown_table(head, body)


def ring_table(rows: Rows) -> list[str]:
    """Tabulate ratios of the time of one attention by the fastest vendor kernel."""
    checks = [row for row in rows if "passed" in row]
    lines = []
    if checks:
        body = [
            [
                str(row["item"]),
                str(row["tokens"]),
                ", ".join(
                    f"{name} {number(x, 2)}" for name, x in row["ratios"].items()
                ),
                "passed" if row["passed"] else "FAILED",
            ]
            for row in checks
        ]
        lines += [
            *markdown_table(["", "S", "error ratio, up to 2 passes", ""], body),
            "",
        ]
    times = ("flash", "cudnn", "ours", "zigzag", "contiguous")
    ratios = (
        *("zigzag", "zigzag slowest", "contiguous", "contiguous slowest"),
        "zigzag of ours",
    )
    body = [
        [
            str(row["item"]),
            *(number(row["ms"].get(name), 3) for name in times),
            number(row["tflops"].get("zigzag"), 0),
            *(number(row["ratios"].get(name), 3) for name in ratios),
        ]
        for row in rows
        if "rounds" in row
    ]
    if not body:
        return lines[:-1]
    head = ["", *(f"{name} ms" for name in times), "zigzag TFLOP/s", *ratios]
    return [
        *lines,
        *markdown_table(head, body),
        "",
        "flash, cudnn, ours: the whole sequence at once. zigzag, contiguous: the sum "
        "of all ranks; ratios are the fastest of flash and cudnn over it. slowest: the "
        "same if all ranks took as long as the slowest. of ours: our own kernel over "
        "the whole sequence, over the zigzag ring.",
    ]


def binaries_table(rows: Rows) -> list[str]:
    """Tabulate registers and spills as Triton gives them; shared memory in KiB."""
    kernels = [
        [
            row["name"],
            str(row["registers"]),
            str(row["spills"]),
            f"{row['shared_bytes'] / 1024:.0f}",
            number(row["compile_seconds"], 1),
        ]
        for row in rows
        if "registers" in row
    ]
    head = ["kernel", "registers", "spills", "shared KiB", "compile s"]
    lines = markdown_table(head, kernels) if kernels else []
    memory = [
        [str(row["item"]), row["name"]]
        + [f"{row[x]:.0f}" for x in ("q_mib", "results_mib", "peak_mib")]
        for row in rows
        if "peak_mib" in row
    ]
    if memory:
        head = ["peak memory, MiB", "kernel", "q", "results", "peak over operands"]
        lines += ["", *markdown_table(head, memory)]
    flex = [row["compile_seconds"] for row in rows if row.get("name", "")[:4] == "flex"]
    if flex:
        lines += ["", f"FlexAttention: {len(flex)} shapes, {sum(flex):.0f} s in all."]
    return lines


def inductor_table(rows: Rows) -> list[str]:
    """Tabulate what was compiled, whether it is right, and times in ms."""
    body = [
        [
            str(row["item"]),
            row.get("unavailable") or ("passed" if row["passed"] else "FAILED"),
            str(row.get("bitwise_equal", "")),
            str(row.get("templates_in_code", "")),
            ", ".join(f"{n} {number(x, 2)}" for n, x in row.get("ratios", {}).items()),
            ", ".join(f"{n} {number(x, 3)}" for n, x in row.get("ms", {}).items()),
        ]
        for row in rows
    ]
    return markdown_table(
        ["", "", "bitwise", "templates", "error ratios, up to 2 passes", "ms"], body
    )


def number(x: Any, digits: int) -> str:
    """Write a number; return "" for what was not measured, and words as they are."""
    if x is None:
        return ""
    return x if isinstance(x, str) else f"{x:.{digits}f}"


def _ratio(x: float | None, y: float | None) -> float | None:
    return x / y if x and y else None


TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "a": correctness_table,
    "b": rates_table,
    "c": configs_table,
    "d": ring_table,
    "e": binaries_table,
    "f": inductor_table,
}
