"""Measure what tiles save of the memory of a training step, and what they cost.

Forward and backward of a Llama of transformers on CPU ranks, compiled by Inductor. Each
case runs in fresh processes. Memory is the growth of the resident set of rank 0 in a
step over what it is before the step, when code, parameters and gradients are there;
blocks of 1 MiB or more go back to the system when they are freed. What malloc keeps of
them by default is measured too. Results go to docs/results/bench_memory.*.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from cpcompile.reporting.graph_report import recording
from tests.models.torchvision_schemas import define_schemas
from tools.bench import memory_fit
from tools.bench.progress import Event
from tools.bench.ranks import in_processes
from tools.bench.resident import (
    give_back_freed_blocks,
    keep_freed_blocks,
    peak,
    reset_peak,
)
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

WIDTH, LAYERS, HEADS = 256, 4, 8
MLP = 688  # Llama's 2.7 times the width
NARROW = 8  # an MLP that takes nothing
# ranks, tokens, vocabulary, width of the MLP, options["tile"] ("auto", or None for
# never), and if it is not None: options["activation_memory"]
Case = tuple[Any, ...]
VOCABULARIES = (2_000, 32_000, 128_000)
CASES: dict[str, list[Case]] = {
    "vocabulary": [
        (2, 8192, v, MLP, tile) for v in VOCABULARIES for tile in (None, "auto")
    ],
    "a wide MLP": [
        (2, 8192, 2_000, mlp, tile)
        for mlp, tile in ((8 * WIDTH, "auto"), (8 * WIDTH, 512), (NARROW, 512))
    ],
    "a budget": [
        (2, 8192, 2_000, MLP, "auto", *budget) for budget in ((), (0.5,), (0.25,))
    ],
    "ranks and tokens": [(4, 16384, 32_000, MLP, "auto")],
}


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument(
        "--tokens", type=int, help="in place of 8192 and 16384; of --fit only those"
    )
    parser.add_argument("--only", choices=CASES, help="the others stay as they are")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    parser.add_argument(
        "--fit", action="store_true", help="compare predictions of cp.fit instead"
    )
    given = parser.parse_args(arguments)
    if given.fit:
        _fit(given)
        return
    record: dict[str, Any] = {
        "setup": setup(steps=given.steps, inner=given.inner),
        "runs": [],
    }
    before = given.out / "bench_memory.json"
    if given.only is not None and before.exists():
        record["runs"] = json.loads(before.read_text())["runs"]
    for name, cases in CASES.items():
        for case in cases if given.only in (None, name) else ():
            ranks, tokens, *rest = case
            tokens = tokens if given.tokens is None else given.tokens * ranks // 2
            measure_into(record, name, (ranks, tokens, *rest))
            report = write_report(given.out, "bench_memory", record, markdown)
    print(report)


def measure_into(record: dict[str, Any], name: str, case: Case) -> None:
    """Measure a case in fresh processes, in place of what is known of it."""
    print(name, case, flush=True)
    about = record["setup"]
    events = in_processes(case[0], measure, case, about["steps"], about["inner"])
    (run,) = [x for kind, x in events if kind == "found"]
    if about["steps"] == 1:  # too few for times
        del run["seconds"], run["first"]
    runs = {(x["about"], tuple(x["case"])): x for x in record["runs"]}
    date = about["date"]
    runs[name, case] = {"about": name, "case": case, "date": date, **run}
    groups = list(CASES)
    record["runs"] = sorted(runs.values(), key=lambda x: groups.index(x["about"]))


def _fit(given: argparse.Namespace) -> None:
    """Measure all lengths or one, and write what is known after each case."""
    name = "bench_memory_fit"
    before = given.out / f"{name}.json"
    found: dict[str, Any] = {"setup": setup(inner=given.inner), "runs": []}
    if before.exists() and given.tokens is not None:
        found["runs"] = json.loads(before.read_text())["runs"]
    lengths = memory_fit.LENGTHS if given.tokens is None else (given.tokens,)
    for _ in memory_fit.measure_into(found, lengths):
        report = write_report(given.out, name, found, memory_fit.markdown)
    print(report)


def measure(put: Callable[[Event], None], case: Case, steps: int, inner: str) -> None:
    """Measure on every rank; rank 0 puts bytes and seconds."""
    give_back_freed_blocks()
    define_schemas()  # before models of transformers are imported
    import transformers

    ranks, tokens, vocabulary, mlp, tile, *budget = case
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=mlp,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=tokens,
        )
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "inner": inner,
        "tile": {None: 0, "auto": None}.get(tile, tile),
    }
    config.outputs = ["loss"]
    if budget:
        options["activation_memory"] = budget[0]
    compiled = torch.compile(model, backend="cp", options=options)
    ids = torch.randint(0, vocabulary, (1, tokens))

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        compiled(input_ids=ids, labels=ids).loss.backward()
        seconds = time.perf_counter() - start
        put(("step", ""))  # whoever waits has a limit for one step
        return seconds

    with recording() as reports:
        first = step()
    tiles = [
        {"path": x.path, "tile": x.tile, "bytes": x.tiled}
        for report in reports
        for x in report.tiles
    ]

    def measured() -> tuple[list[int], list[float]]:
        growth, seconds = [], []
        for _ in range(steps):
            before = reset_peak()
            seconds.append(step())
            growth.append(peak() - before)
        return growth, seconds

    growth, _ = measured()
    keep_freed_blocks()
    kept, seconds = measured()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {
        "growth": max(growth),
        "with_kept_blocks": max(kept),
        "seconds": min(seconds),
        "first": first,
        "parameters": parameters,
        "tiles": tiles,
    }
    put(("found", found))


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    rows = []
    for run in record["runs"]:
        ranks, tokens, vocabulary, mlp, tile, *budget = run["case"]
        same = next(
            x
            for x in record["runs"]
            if x["about"] == run["about"] and x["case"][:4] == run["case"][:4]
        )
        rows.append(
            [
                str(ranks),
                f"{tokens:,}",
                f"{vocabulary:,}",
                f"{mlp:,}",
                str(tile),
                str(budget[0]) if budget else "",
                *_compared(run, same, "growth"),
                *_compared(run, same, "with_kept_blocks"),
                f"{run['parameters'] / 2**20:.0f}",
                f"{run['seconds']:.2f}" if "seconds" in run else "",
                _slower(run, same),
                f"{run['first']:.0f}" if "first" in run else "",
                run.get("date", about["date"]),
            ]
        )
    head = ["ranks", "tokens", "vocabulary", "MLP", "tile", "budget", "MiB"]
    head += ["to the first", "freed blocks kept, MiB", "to the first"]
    head += ["parameters, MiB", "s per step", "to the first"]
    head += ["s of the first step", "date"]
    lines = [
        "# Memory of a training step",
        "",
        f"Forward and backward of a Llama (width {WIDTH}, {LAYERS} layers, float32) on "
        f"CPU ranks, one thread each, {about['inner']}; {setup_text(about)}. MiB: "
        "growth of rank 0 in a step over what is there before it, with code, "
        "parameters and gradients; blocks of 1 MiB or more go back to the system when "
        "they are freed, or up to 32 MiB are kept by malloc, as by default, also for "
        "the times, which one step alone does not give. Ratios are to "
        "the first row with the same model and tokens; times of different dates are "
        "not compared. Rows without the first MiB have been measured with malloc as it "
        "is. A budget is `activation_memory`. Printed by `tools/in_venv python "
        "-m tools.bench memory`.",
        "",
        *markdown_table(head, rows),
        "",
        *_independent(record["runs"]),
        *_share_of_mlp(record["runs"]),
    ]
    return "\n".join([*lines, ""])


def _compared(run: dict[str, Any], other: dict[str, Any], name: str) -> tuple[str, str]:
    """Return MiB of what was measured, and their ratio."""
    size, first = run.get(name), other.get(name)
    if size is None:
        return "", ""
    ratio = "" if first is None else f"{size / first:.2f}"
    return f"{size / 2**20:.0f}", ratio


def _independent(runs: list[dict[str, Any]]) -> list[str]:
    """Say how the peak depends on the vocabulary, beside one gradient of the head."""
    every = [x for x in runs if x["about"] == "vocabulary" and "growth" in x]
    tiled = [x for x in every if x["case"][4] == "auto"]
    lines = []
    for run in tiled[1:]:
        words = run["case"][2]
        head = words * WIDTH * 4
        ratio = (run["growth"] - head) / tiled[0]["growth"]
        lines.append(
            f"{words:,} words: without one gradient of the head, {head / 2**20:.0f} "
            f"MiB, {ratio:.2f} of the peak with {tiled[0]['case'][2]:,}."
        )
    return lines


def _share_of_mlp(runs: list[dict[str, Any]]) -> list[str]:
    """Say what the wide MLP takes, against one tile of its values.

    While tiles of one layer run, so do the sums of the gradients of its weights. Those
    of other layers may be there too, and are not left out.
    """
    every = [x for x in runs if x["about"] == "a wide MLP" and "growth" in x]
    tiled = [x for x in every if x["case"][4] == 512]
    if len(tiled) < 2:
        return []
    wide, narrow = sorted(tiled, key=lambda x: -x["case"][3])
    more = wide["growth"] - narrow["growth"]
    weights = (wide["parameters"] - narrow["parameters"]) / LAYERS
    tile = max(x["bytes"] for x in wide["tiles"] if "mlp" in x["path"])
    return [
        f"An MLP of 8 times the width, in tiles of 512 tokens, adds "
        f"{more / 2**20:.1f} MiB to one of {NARROW}. Without the gradients of one "
        f"layer, {weights / 2**20:.1f} MiB, these are {(more - weights) / 2**20:.1f}; "
        f"the values of one tile are {tile / 2**20:.1f} MiB."
    ]


def _slower(run: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a ratio of times, if both were measured in the same run of this tool."""
    timed = "seconds" in run and "seconds" in other
    if not timed or run.get("date") != other.get("date"):
        return ""
    return f"{run['seconds'] / other['seconds']:.2f}"
