"""Simulate a model of attention and gated delta rules on many ranks; nothing runs.

The shape is that of Qwen3.5 (three of four layers are gated delta rules), on every
hardware profile. Results go to docs/results/hybrid_plans.*.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpcompile as cp
from cpcompile.apps.cli.presets import MixerLayers, find_preset
from cpcompile.cost.hardware.profile import load_profile, profile_names
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.mixer_planner import plan_mixer, states_win_from
from cpcompile.cost.mixer_shape_plan import MixerShapePlan
from cpcompile.cost.mixer_shapes import KernelWork
from tools.results import RESULTS, markdown_table, setup, setup_text, write_results

MODEL = "qwen3.5"
RANKS = (8, 16, 32, 64)
LENGTHS = tuple(2**i for i in range(13, 21))
WORKS = tuple(KernelWork)
# fla-org/flash-linear-attention#691: 32768 tokens, 64 heads of 128 on 4 H800; ms on
# one of them, with heads exchanged, and with fla's own passing of states.
PUBLISHED = {
    "forward": {"one device": 4.808, "exchange": 4.114, "states": 2.001},
    "both": {"one device": 15.560, "exchange": 10.591, "states": 5.730},
}


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--model", default=MODEL, help="of cpcompile plan, with mixers")
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=["h100_sxm"],
        metavar="NAME",
        help="profiles whose tables are printed; the record has all",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args(arguments)
    about = setup(model=options.model, printed=options.hardware)
    del about["load_average"]  # which changes no number here
    record = {
        "setup": about,
        "rows": [
            row(options.model, hardware, ranks, tokens)
            for hardware in profile_names()
            for ranks in RANKS
            for tokens in LENGTHS
        ],
        "states_win_from": crossovers(options.model),
        "published": published(),
    }
    text = markdown(record)
    write_results(options.out, "hybrid_plans", record, text)
    print(text)


def row(model: str, hardware: str, ranks: int, tokens: int) -> dict[str, Any]:
    """Plan one length on so many ranks."""
    preset = find_preset(model)
    assert preset.mixer is not None, f"{model} has no mixers"
    attention = cp.plan(
        batch=1,
        heads=preset.heads,
        kv_heads=preset.kv_heads,
        head_dim=preset.head_dim,
        seq=tokens,
        ranks=ranks,
        hardware=hardware,
        relayout=True,  # mixers have tokens in their natural order
    )
    seconds = attention.chosen.seconds or 0.0
    found: dict[str, Any] = {
        "hardware": attention.hardware,
        "ranks": ranks,
        "tokens": tokens,
        "attention": {
            "strategy": attention.chosen.label,
            "seconds": seconds,
            "runner_up": attention.runner_up_text(),
            "wire_bytes": attention.chosen.wire_bytes,
        },
    }
    for work in WORKS:
        plan = mixer_plan(preset.mixer, hardware, ranks, tokens, work)
        own = plan.chosen.seconds or 0.0
        found[work.value] = {
            "strategy": plan.strategy.value,
            "seconds": own,
            "runner_up": plan.runner_up_text(),
            "wire_bytes": plan.chosen.wire_bytes,
            "seconds_of_model": preset.layers * seconds + preset.mixer.layers * own,
        }
    return found


def mixer_plan(
    mixer: MixerLayers, hardware: str, ranks: int, tokens: int, work: KernelWork
) -> MixerShapePlan:
    """Plan the mixers of a model."""
    return plan_mixer(
        kind=mixer.kind,
        seq=tokens,
        ranks=ranks,
        key_heads=mixer.key_heads,
        value_heads=mixer.value_heads,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        hardware=hardware,
        work=work.value,
    )


def crossovers(model: str) -> list[dict[str, Any]]:
    """Return from how many tokens per rank on states are cheaper than an exchange."""
    mixer = find_preset(model).mixer
    assert mixer is not None, f"{model} has no mixers"
    found = []
    for hardware in profile_names():
        for ranks in RANKS:
            for work in WORKS:
                plan = mixer_plan(mixer, hardware, ranks, LENGTHS[-1], work)
                possible = dict(plan.seconds)
                tokens = states_win_from(
                    plan.shape, load_profile(hardware), ranks, work=work
                )
                found.append(
                    {
                        "hardware": hardware,
                        "ranks": ranks,
                        "work": work.value,
                        "exchange_is_possible": MixerStrategy.EXCHANGE in possible,
                        "tokens_per_rank": tokens,
                    }
                )
    return found


def published() -> list[dict[str, Any]]:
    """Return published milliseconds beside those of the model, by strategy."""
    found = []
    for direction, times in PUBLISHED.items():
        for way, measured in times.items():
            plan = plan_mixer(
                kind="gated_delta_rule",
                seq=32768,
                ranks=1 if way == "one device" else 4,
                value_heads=64,
                value_dim=128,
                hardware="h800",
                direction=direction,
                strategy="auto" if way == "one device" else way,
                work="chunks",
            )
            seconds = plan.chosen.seconds or 0.0
            found.append(
                {
                    "direction": direction,
                    "way": way,
                    "measured": measured,
                    "predicted": 1e3 * seconds,
                }
            )
    return found


def markdown(record: dict[str, Any]) -> str:
    """Write the report."""
    about = record["setup"]
    preset = find_preset(about["model"])
    assert preset.mixer is not None, f"{about['model']} has no mixers"
    mixer = preset.mixer
    lines = [
        "# A model of attention and gated delta rules on many ranks",
        "",
        f"A simulation by the cost model for the sizes of {about['model']}: "
        f"{preset.layers} layers of attention ({preset.heads} heads, "
        f"{preset.kv_heads} of keys and values, {preset.head_dim} dims) and "
        f"{mixer.layers} of {mixer.kind} ({mixer.value_heads} heads of "
        f"{mixer.value_dim}, keys repeated for each), batch 1, bfloat16, forward and "
        "backward; no projections, MLPs and convolutions. Nothing ran. Printed by "
        "`tools/in_venv python -m tools.bench hybrid`; "
        f"{setup_text(about)}.",
        "",
        '"Read once": a kernel only reads its operands once. "As published", which the '
        "compiler assumes of kernels that cannot run without data: it also computes, "
        "as fast as published kernels of fla on H800, and elsewhere at the same part "
        "of attention's rate, which is an assumption. Times are those of one "
        "layer on the slowest rank; MB (1e6) are what a rank receives for it.",
        "",
        "## From how many tokens per rank on states are cheaper than an exchange",
        "",
        '"all": for any length. "none": an exchange is cheaper for long sequences, as '
        'its messages cost less than computing summaries. "-": one of both is '
        "not possible. On more ranks than heads an exchange deals out the channels of "
        "values, and gathers the rest.",
        "",
        *crossover_table(record["states_win_from"]),
        "",
        "## Against published times",
        "",
        "Milliseconds of 32768 tokens, 64 heads of 128, 4 H800 "
        "(fla-org/flash-linear-attention#691), beside the model's with kernels as "
        "published. The forward on one device is what that speed was fitted to; a "
        "backward of fla keeps more, and does not compute the forward again. States "
        "are fla's own there: one more kernel makes a summary, and not one more call.",
        "",
        *markdown_table(
            ["direction", "way", "measured", "predicted", "ratio"],
            [
                [
                    x["direction"],
                    x["way"],
                    f"{x['measured']:.2f}",
                    f"{x['predicted']:.2f}",
                    f"{x['predicted'] / x['measured']:.2f}",
                ]
                for x in record["published"]
            ],
        ),
    ]
    for hardware in about["printed"]:
        name = load_profile(hardware).name
        rows = [x for x in record["rows"] if x["hardware"] == name]
        lines += ["", f"## {name}", "", *length_table(rows)]
    lines += ["", "The JSON file has the other profiles.", ""]
    return "\n".join(lines)


def crossover_table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row per profile, a column per kernel and number of ranks."""
    words = {KernelWork.OPERANDS: "read once", KernelWork.CHUNKS: "as published"}
    head = ["profile", *(f"{words[w]}, {n} ranks" for w in WORKS for n in RANKS)]
    cells = {(x["hardware"], x["work"], x["ranks"]): tokens_text(x) for x in found}
    names = dict.fromkeys(x["hardware"] for x in found)
    rows = [
        [name, *(cells[name, w.value, n] for w in WORKS for n in RANKS)]
        for name in names
    ]
    return markdown_table(head, rows)


def tokens_text(crossover: dict[str, Any]) -> str:
    """Write a crossover in words."""
    tokens = crossover["tokens_per_rank"]
    if not crossover["exchange_is_possible"]:
        return "-"
    if tokens is None:
        return "none"
    return f"{tokens:,.0f}" if tokens >= 1 else "all"


def length_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row per number of ranks and length."""
    head = ["ranks", "tokens", "attention", "ms", "runner-up", "MB"]
    for words in ("read once", "as published"):
        head += [f"delta rule, {words}", "ms", "runner-up", "MB"]
    head += ["ms of all layers, as published"]
    lines = []
    for x in rows:
        cells = [str(x["ranks"]), f"{x['tokens']:,}"]
        for part in ("attention", *(w.value for w in WORKS)):
            plan = x[part]
            cells += [
                plan["strategy"],
                f"{1e3 * plan['seconds']:.3f}",
                plan["runner_up"],
                f"{(plan['wire_bytes'] or 0) / 1e6:.1f}",
            ]
        total = x[KernelWork.CHUNKS.value]["seconds_of_model"]
        lines.append([*cells, f"{1e3 * total:.1f}"])
    return markdown_table(head, lines)
