"""Print how well the cost model predicts what others measured and published.

The tables are in tests/data, each with its source.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cost.measured import TABLES, USP_OUTLIER
from tests.cost.published import balanced_speedups, copy_shares, hiding_chunks
from tests.cost.scoring import Score, Shape
from tools.results import markdown_table, write_results

HEAD = (
    *("table", "times", "predicted / measured: least, median, most"),
    *("best form chosen", "pairs in order", "mean regret", "worst regret"),
)


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--verbose", action="store_true", help="every shape, in ms")
    parser.add_argument("--out", type=Path, help="folder, such as docs/results")
    options = parser.parse_args(arguments)
    scores = {name: score() for name, score in TABLES.items()}
    usp = next(name for name in scores if name.startswith("USP"))
    scores[f"{usp}, without {USP_OUTLIER}"] = scores[usp].without(USP_OUTLIER)
    text = markdown(scores)
    print(text)
    if options.verbose:
        for name, score in scores.items():
            print(f"\n{name}")
            print("\n".join(shape_lines(each) for each in score.shapes))
    if options.out is not None:
        record = {name: figures(score) for name, score in scores.items()}
        write_results(options.out, "cost_model", record, text + "\n")


def markdown(scores: dict[str, Score]) -> str:
    """Write the report."""
    speedups = balanced_speedups()
    equal = sum(each.published == each.ours for each in speedups)
    chunks = "; ".join(f"{x.name} {x.published:g}, {x.ours:g}" for x in hiding_chunks())
    shares = "; ".join(
        f"{x.name} {x.published:.2f}, {x.ours:.2f}" for x in copy_shares()
    )
    return "\n".join(
        [
            "# The cost model against published figures",
            "",
            "Printed by `tools/in_venv python -m tools.bench cost_model`; nothing "
            "ran. Regret: measured time "
            "of the form that the model chooses over that of the fastest measured "
            "form, minus 1. Pairs: forms of one shape that measure more than 5 % "
            "apart.",
            "",
            "Not independent of these tables are: the bytes that eager sums over ring "
            "steps move, forward and backward, fitted to the first table; the share "
            "of a transfer that computation hides on NVLink, 0.5, fitted to USP and "
            "vllm-omni; causal rates of A100 (single runs in the first table); rates "
            "and links of RTX 4090 (AI_analysis); the bridge of L20 (USP).",
            "",
            *markdown_table(
                HEAD, [[name, *cells(each)] for name, each in scores.items()]
            ),
            "",
            f"- Theoretical speedups of the Striped Attention paper: {equal} of "
            f"{len(speedups)} equal to the printed digit.",
            "- Thousands of tokens per rank that hide a hop, Ring Attention paper and "
            f"ours: {chunks}.",
            "- One copy of q, k and v over their all-to-all, pytorch issue 178066 and "
            f"ours: {shares}.",
        ]
    )


def cells(score: Score) -> list[str]:
    """Return one row of the table."""
    found = figures(score)
    ratios = "ratios only"
    if score.ratios:
        ratios = ", ".join(f"{found[x]:.2f}" for x in ("least", "median", "most"))
    ordered, pairs = score.pairs
    if not pairs:
        return [str(score.rows), ratios, *["no choice"] * 4]
    return [
        str(score.rows),
        ratios,
        f"{score.hits} of {len(score.shapes)}",
        f"{ordered} of {pairs}",
        f"{score.mean_regret:.1%}",
        f"{score.worst.regret:.1%} ({score.worst.name})",
    ]


def figures(score: Score) -> dict[str, Any]:
    """Return a score as numbers, with every shape."""
    ratios = score.ratios
    return {
        "times": score.rows,
        "least": min(ratios, default=None),
        "median": statistics.median(ratios) if ratios else None,
        "most": max(ratios, default=None),
        "best_chosen": score.hits,
        "shapes": {x.name: [x.chosen, x.best, x.regret] for x in score.shapes},
        "pairs": score.pairs,
        "mean_regret": score.mean_regret,
        "worst_regret": score.worst.regret,
    }


def shape_lines(shape: Shape) -> str:
    """Write a shape with its forms, fastest first."""
    lines = [f"  {shape.name}: {shape.chosen} chosen, regret {shape.regret:.1%}"]
    for form in sorted(shape.measured, key=shape.measured.__getitem__):
        ours, theirs = shape.seconds(form) * 1e3, shape.measured[form] * 1e3
        lines.append(f"    {form:30} {ours:9.2f} predicted {theirs:9.2f} measured")
    return "\n".join(lines)
