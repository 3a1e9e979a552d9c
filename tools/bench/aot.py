"""Compile every configuration of the step kernels for GPUs that need not be here.

Writes docs/results/aot.md and aot.json. Triton brings ptxas and the tools that read
binaries, so that registers, spills, shared memory and matrix instructions of sm80,
sm90, sm100 and gfx942 are known on any machine. Sizes are literals in the code, as
Inductor writes them for static shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

import triton

from cpcompile.kernels.configs import ARCHITECTURES
from tools.bench.aot_cases import (
    DTYPES,
    HEADS,
    KV_HEADS,
    TOKENS,
    Case,
    Figures,
    cases,
    digest,
    measure_all,
)
from tools.results import RESULTS, markdown_table, write_results


def recorded() -> dict[str, Figures]:
    """Read the figures in docs/results/aot.json, by the digest of what was compiled."""
    rows = json.loads((RESULTS / "aot.json").read_text())
    names = [field.name for field in dataclasses.fields(Figures)]
    return {
        row["digest"]: Figures(*(row[name] for name in names))
        for row in rows
        if "digest" in row
    }


def measure_changed(wanted: list[Case]) -> list[Figures]:
    """Return the figures of every case; compile those not recorded as they are now."""
    known, digests = recorded(), [digest(case) for case in wanted]
    new = [c for c, key in zip(wanted, digests, strict=True) if key not in known]
    found = dict(zip(new, measure_all(new) if new else [], strict=True))
    return [
        found[case] if case in found else known[key]
        for case, key in zip(wanted, digests, strict=True)
    ]


def markdown(wanted: list[Case], figures: list[Figures]) -> str:
    """Write the report: the defaults first, then every candidate."""
    lines = [
        "# Step kernels, compiled ahead of time",
        "",
        f"triton {triton.__version__}; chunks of {TOKENS} tokens, {HEADS} query and "
        f"{KV_HEADS} key heads, with incoming accumulators. Printed by "
        "`tools/in_venv python -m tools.bench aot`; nothing ran. Registers are per "
        "thread, spills count the instructions that store a register to memory "
        "(gfx942: spilled registers), products the matrix instructions in the code "
        "(HMMA; HGMMA on sm90, UTC*MMA on sm100, MFMA on gfx942). A tile is query "
        "rows x keys.",
    ]
    for title, keep in (("Defaults", True), ("Candidates of autotuning", False)):
        lines += ["", f"## {title}", "", *_table(wanted, figures, keep)]
    return "\n".join(lines) + "\n"


def _table(wanted: list[Case], figures: list[Figures], default: bool) -> list[str]:
    columns = "arch kernel dtype D tile warps stages mask registers spills KB products"
    rows: list[list[object]] = []
    for case, found in zip(wanted, figures, strict=True):
        if case.is_default == default:
            config = case.config
            rows.append(
                [
                    case.architecture,
                    case.kernel.value,
                    DTYPES[case.dtype],
                    case.dim,
                    f"{config.block_m} x {config.block_n}",
                    config.num_warps,
                    config.num_stages,
                    case.visible,
                    found.registers,
                    found.spills,
                    f"{found.shared_bytes / 1024:.0f}",
                    found.error or found.products,
                ]
            )
    return markdown_table(columns.split(), rows)


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument(
        "--arch", action="append", choices=ARCHITECTURES, help="prints, writes nothing"
    )
    parser.add_argument(
        "--changed",
        action="store_true",
        help="compiles only what is not recorded as it is now",
    )
    options = parser.parse_args(arguments)
    wanted = list(cases(tuple(options.arch or ARCHITECTURES)))
    figures = measure_changed(wanted) if options.changed else measure_all(wanted)
    print(report := markdown(wanted, figures))
    if options.arch is None:
        record = [
            {
                **dataclasses.asdict(case),
                "dtype": DTYPES[case.dtype],
                **dataclasses.asdict(found),
                "digest": digest(case),
            }
            for case, found in zip(wanted, figures, strict=True)
        ]
        write_results(RESULTS, "aot", record, report)
