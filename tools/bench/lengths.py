"""Measure a stream of sequences of many lengths, with padding.

Forward and backward of a Llama of transformers on CPU ranks, one sequence after the
other, each with an attention mask of its own. The programs that are compiled are
counted; then steps of the program that serves many lengths and of one that is compiled
for a single length take turns. Results go to docs/results/bench_lengths.*.
"""

from __future__ import annotations

import argparse
import random
import statistics
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
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

MODEL = {
    "vocab_size": 2_000,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
}
SHORTEST = 100
FIXED = (1024, 4096, 4095)  # lengths that are compiled alone as well
PADDING = 10  # one of this many tokens is hidden, at the end


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--lengths", type=int, default=50, help="of the stream")
    parser.add_argument("--longest", type=int, default=8192, help="tokens")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=5, help="steps in turns")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    about = setup(
        lengths=given.lengths,
        longest=given.longest,
        rounds=given.rounds,
        inner=given.inner,
    )
    record: dict[str, Any] = {"setup": about, "runs": []}
    for ranks in map(int, given.ranks.split(",")):
        lengths = stream(given.lengths, given.longest)
        found: dict[str, Any] = {"stream": [], "fixed": []}
        events = in_processes(ranks, measure, ranks, lengths, given.rounds, given.inner)
        collect(found, events, len(lengths) + len(FIXED))
        record["runs"].append({"ranks": ranks, **found})
    print(write_report(given.out, "bench_lengths", record, markdown))


def stream(count: int, longest: int) -> list[int]:
    """Return different lengths in a random order; the ranks divide few of them."""
    return random.Random(0).sample(range(SHORTEST, longest + 1), count)


def measure(
    put: Callable[[Event], None],
    ranks: int,
    lengths: Sequence[int],
    rounds: int,
    inner: str,
) -> None:
    """Measure on every rank; rank 0 puts the seconds, by length."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    config.outputs = ["loss"]
    options: dict[str, Any] = {"mesh": mesh, "inner": inner}
    options["shard"] = {"input_ids": 1, "labels": 1}
    with recording() as reports:
        step = new_step(options, None)
        for length in lengths:
            before = len(set(map(id, reports)))
            seconds = step(length)
            programs = len(set(map(id, reports)))
            put(("step", f"{ranks} ranks, {length} tokens"))
            found = {"length": length, "seconds": seconds, "programs": programs}
            put(("stream", found | {"compiled": programs - before}))
    for length in (n for n in FIXED if n <= max(lengths)):
        fixed = new_step(options, False)
        seconds = {"any": [], "one": []}
        for _ in range(rounds + 1):
            seconds["any"].append(step(length))
            seconds["one"].append(fixed(length))
        put(("step", f"{ranks} ranks, {length} tokens alone"))
        put(("fixed", {"length": length, **{k: x[1:] for k, x in seconds.items()}}))


def new_step(options: dict[str, Any], dynamic: bool | None) -> Callable[[int], float]:
    """Make a step, forward and backward at a length, that returns its seconds."""
    define_schemas()  # before transformers imports torchvision
    import transformers  # heavy

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    compiled = torch.compile(model, backend="cp", options=options, dynamic=dynamic)

    def step(length: int) -> float:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(MODEL["vocab_size"], (1, length), generator=generator)
        mask = (torch.arange(length) < length - length // PADDING).long()[None]
        dist.barrier()
        start = time.perf_counter()
        out = compiled(input_ids=tokens, labels=tokens, attention_mask=mask)
        out.loss.backward()
        model.zero_grad()
        return time.perf_counter() - start

    return step


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    rows, turns = [], []
    for run in record["runs"]:
        seen = run["stream"]
        new = [str(x["length"]) for x in seen if x["compiled"]]
        compiling = sum(x["seconds"] for x in seen if x["compiled"])
        row = [run["ranks"], len(seen), seen[-1]["programs"], ", ".join(new)]
        rows.append([*map(str, row), f"{compiling:.0f}"])
        for each in run["fixed"]:
            ratios = [x / y for x, y in zip(each["any"], each["one"], strict=True)]
            middle = [statistics.median(each[k]) for k in ("any", "one")]
            turns.append(
                [
                    str(run["ranks"]),
                    f"{each['length']:,}",
                    *(f"{x:.2f}" for x in middle),
                    f"{statistics.median(ratios):.2f}",
                ]
            )
    sizes = f"width {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers"
    lines = [
        "# A stream of many lengths",
        "",
        f"Forward and backward of a Llama ({sizes}, float32) on CPU ranks, one thread "
        f"each, {about['inner']}; {setup_text(about)}. {about['lengths']} different "
        f"lengths from {SHORTEST} to {about['longest']:,}, in a "
        "random order, each with a padding mask. Printed by "
        "`tools/in_venv python -m tools.bench lengths`.",
        "",
        *markdown_table(
            ["ranks", "lengths", "programs", "compiled at", "s of these steps"], rows
        ),
        "",
        f"Steps in turns ({about['rounds']} each) of the program for many lengths, and "
        "of one for this length alone:",
        "",
        *markdown_table(
            ["ranks", "tokens", "s, any length", "s, one length", "ratio, median"],
            turns,
        ),
    ]
    return "\n".join([*lines, ""])
