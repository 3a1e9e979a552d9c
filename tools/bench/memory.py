"""Measures what tiles save of the memory of a training step, and what they cost.

Forward and backward of a Llama of transformers on CPU ranks, compiled by Inductor. Each
case runs in fresh processes. Memory is the growth of the resident set of rank 0 in a
step over what it is before the step, when code, parameters and gradients are there.
Results go to docs/results/bench_memory.*.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.models.torchvision_schemas import define_schemas
from tools.bench.progress import Event
from tools.bench.ranks import in_processes
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

WIDTH, LAYERS, HEADS = 256, 4, 8
MLP = 688  # Llama's 2.7 times the width
# ranks, tokens, vocabulary, width of the MLP, options["tile"], and if others than
# those above: width, layers, heads
Case = tuple[Any, ...]
VOCABULARIES = (2_000, 32_000, 128_000)
CASES: dict[str, list[Case]] = {
    "vocabulary": [
        (2, 8192, v, MLP, tile) for v in VOCABULARIES for tile in (None, "auto")
    ],
    "ranks and tokens": [(4, 16384, 32_000, MLP, "auto")],
    "a wide MLP": [(2, 8192, 2_000, 8 * WIDTH, tile) for tile in ("auto", 512)],
}


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--tokens", type=int, help="in place of 8192 and 16384")
    parser.add_argument("--inner", default="inductor", help="or aot_eager")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "setup": setup(steps=given.steps, inner=given.inner),
        "runs": [],
    }
    for name, cases in CASES.items():
        for case in cases:
            ranks, tokens, *rest = case
            tokens = tokens if given.tokens is None else given.tokens * ranks // 2
            about = (ranks, tokens, *rest)
            print(name, about, flush=True)
            events = in_processes(ranks, measure, about, given.steps, given.inner)
            (found,) = [x for kind, x in events if kind == "found"]
            record["runs"].append({"about": name, "case": about, **found})
    print(write_report(given.out, "bench_memory", record, markdown))


def measure(put: Callable[[Event], None], case: Case, steps: int, inner: str) -> None:
    """On every rank; rank 0 puts bytes and seconds."""
    define_schemas()  # before models of transformers are imported
    import transformers

    ranks, tokens, vocabulary, mlp, tile, *shape = case
    width, layers, heads = shape or (WIDTH, LAYERS, HEADS)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=tokens,
        )
    )
    options = {"mesh": mesh, "inner": inner, "tile": tile, "outputs": ["loss"]}
    compiled = torch.compile(model, backend="cp", options=options)
    ids = torch.randint(0, vocabulary, (1, tokens))

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        compiled(input_ids=ids, labels=ids).loss.backward()
        return time.perf_counter() - start

    first = step()
    growth, seconds = [], []
    for _ in range(steps):
        before = reset_peak()
        seconds.append(step())
        growth.append(peak() - before)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {
        "growth": max(growth),
        "seconds": min(seconds),
        "first": first,
        "parameters": parameters,
    }
    put(("found", found))


def reset_peak() -> int:
    """Begin to measure; returns the bytes that are resident."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The most bytes that were resident since reset_peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [x for x in lines if x.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    about = record["setup"]
    rows = []
    for run in record["runs"]:
        ranks, tokens, vocabulary, mlp, tile = run["case"]
        (same,) = [
            x
            for x in record["runs"]
            if x["about"] == run["about"]
            and x["case"][:4] == run["case"][:4]
            and (x["case"][4] is None or len(CASES[x["about"]]) < 3)
        ][:1]
        rows.append(
            [
                str(ranks),
                f"{tokens:,}",
                f"{vocabulary:,}",
                f"{mlp:,}",
                str(tile),
                f"{run['growth'] / 2**20:.0f}",
                f"{run['growth'] / same['growth']:.2f}",
                f"{run['parameters'] / 2**20:.0f}",
                f"{run['seconds']:.2f}",
                f"{run['seconds'] / same['seconds']:.2f}",
                f"{run['first']:.0f}",
            ]
        )
    head = ["ranks", "tokens", "vocabulary", "MLP", "tile", "MiB", "to the first"]
    head += ["parameters, MiB", "s per step", "to the first", "s of the first step"]
    lines = [
        "# Memory of a training step",
        "",
        f"Forward and backward of a Llama (width {WIDTH}, {LAYERS} layers, float32) on "
        f"CPU ranks, one thread each, {about['inner']}; {setup_text(about)}. MiB: "
        "growth of rank 0 in a step over what is there before it, with code, "
        "parameters and gradients. Ratios are to the first row with the same model "
        "and tokens. Printed by `tools/in_venv python -m tools.bench memory`.",
        "",
        *markdown_table(head, rows),
    ]
    return "\n".join([*lines, ""])
