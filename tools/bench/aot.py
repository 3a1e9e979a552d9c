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
    """Write the report: one row for all cases of a kernel and a dtype."""
    rows: dict[tuple[object, ...], list[Figures]] = {}
    for case, found in zip(wanted, figures, strict=True):
        config = "default" if case.is_default else "candidates"
        kernel = (case.architecture, case.kernel.value, DTYPES[case.dtype])
        rows.setdefault((*kernel, config), []).append(found)
    return "\n".join(
        [
            "# Step kernels, compiled ahead of time",
            "",
            f"triton {triton.__version__}; chunks of {TOKENS} tokens, {HEADS} query "
            f"and {KV_HEADS} key heads, with incoming accumulators. Printed by "
            "`tools/in_venv python -m tools.bench aot`; nothing ran. A row is of all "
            "cases of a kernel: head dims, masks, changes of scores and, of the "
            "candidates of autotuning, tiles, warps and stages. Registers are the most "
            "per thread, spills the most instructions that store a register to memory "
            "(gfx942: spilled registers), KB the most shared memory, products the "
            "fewest matrix instructions in the code (HMMA; HGMMA on sm90, UTC*MMA on "
            "sm100, MFMA on gfx942). [The record](aot.json) has every case.",
            "",
            *markdown_table(_COLUMNS, [_row(key, of) for key, of in rows.items()]),
            "",
        ]
    )


_COLUMNS = (
    *("arch", "kernel", "dtype", "configs", "cases"),
    *("registers", "spills", "KB", "products", "failed"),
)


def _row(key: tuple[object, ...], figures: list[Figures]) -> list[object]:
    compiled = [found for found in figures if not found.error]
    shared = max((found.shared_bytes for found in compiled), default=0)
    return [
        *(*key, len(figures)),
        max((found.registers for found in compiled), default=0),
        max((found.spills for found in compiled), default=0),
        f"{shared / 1024:.0f}",
        min((found.products for found in compiled), default=0),
        len(figures) - len(compiled),
    ]


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
