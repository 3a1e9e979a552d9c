"""Compare the memory that `cp.fit` predicts for a training step with what it takes.

Forward and backward of three decoders on 2 CPU ranks, compiled by Inductor, each case
in fresh processes. Gradients are None before a step, as after optimizer.zero_grad(), so
that the growth of the resident set of rank 0 holds the new ones. The prediction is
`Memory.step`, with the strategy that the plan has chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from cpcompile.cost.max_sequence.model_memory import (
    EXCHANGING,
    Decoder,
    Memory,
    Training,
    memory_of,
)
from cpcompile.cost.plans import Strategy
from cpcompile.reporting.graph_report import recording
from tests.models.torchvision_schemas import define_schemas
from tools.bench.progress import Event
from tools.bench.ranks import in_processes
from tools.bench.resident import (
    give_back_freed_blocks,
    keep_freed_blocks,
    peak,
    reset_peak,
)
from tools.gpt import BYTES, GPT
from tools.results import markdown_table, setup_text

RANKS, WORDS = 2, 8_000
LENGTHS = (4096, 6144, 8192, 12288)
TARGET = 0.15
MODELS = {
    "GPT of tools/gpt.py": Decoder(4, 8, 8, 32, 256, 1024, BYTES, gated=False),
    "Llama": Decoder(4, 8, 8, 32, 256, 688, WORDS),
    "Qwen3": Decoder(4, 8, 2, 64, 256, 512, WORDS, normed=True),
}


def measure_into(record: dict[str, Any], lengths: Collection[int]) -> Iterator[None]:
    """Measure cases, each in fresh processes; yield when one more is in the record."""
    order = [(name, tokens) for name in MODELS for tokens in LENGTHS]
    known = {(x["model"], x["tokens"]): x for x in record["runs"]}
    for name, tokens in order:
        if tokens not in lengths:
            continue
        print(name, tokens, flush=True)
        events = in_processes(RANKS, measure, name, tokens, record["setup"]["inner"])
        (found,) = [x for kind, x in events if kind == "found"]
        about = {"model": name, "tokens": tokens, "date": record["setup"]["date"]}
        known[name, tokens] = {**about, **found}
        record["runs"] = [known[x] for x in order if x in known]
        yield


def measure(put: Callable[[Event], None], name: str, tokens: int, inner: str) -> None:
    """Measure on every rank; rank 0 puts bytes and the strategy."""
    give_back_freed_blocks()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model, inputs = build(name, tokens)
    options = {"mesh": mesh, "inner": inner}
    if name in ("Llama", "Qwen3"):
        config.outputs = ["loss"]
    compiled = torch.compile(model, backend="cp", options=options)

    def step() -> None:
        dist.barrier()
        found = compiled(**inputs)
        loss = found if isinstance(found, Tensor) else found.loss
        loss.backward()
        put(("step", ""))  # whoever waits has a limit for one step

    with recording() as reports:
        step()
    plans = [call.plan for report in reports for call in report.calls]
    chosen = next(plan.chosen for plan in plans if plan is not None)

    def growth() -> int:
        every = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            before = reset_peak()
            step()
            every.append(peak() - before)
        return max(every)

    given_back = growth()
    keep_freed_blocks()
    found = {
        "growth": given_back,
        "with_kept_blocks": growth(),
        "label": chosen.label,
        "strategy": chosen.strategy.value,
        "messages": chosen.peak_extra_bytes,
    }
    put(("found", found))


def build(name: str, tokens: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """Make a model, and its inputs by name."""
    sizes = MODELS[name]
    ids = torch.randint(0, sizes.vocabulary, (1, tokens))
    if name not in ("Llama", "Qwen3"):
        return GPT(sizes.hidden, sizes.heads, sizes.layers, tokens), {"tokens": ids}
    define_schemas()  # before models of transformers are imported
    import transformers  # slow

    config = getattr(transformers, f"{name}Config")(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=tokens,
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model, {"input_ids": ids, "labels": ids}


def predicted(found: dict[str, Any]) -> Memory:
    """Predict memory by the model, with the strategy of the measured run."""
    sizes = MODELS[found["model"]]
    if found["model"] not in ("Llama", "Qwen3"):
        sizes = replace(sizes, positions=found["tokens"])
    tokens = found["tokens"] // RANKS
    exchanged = Strategy(found["strategy"]) in EXCHANGING
    how = Training(element=4, optimizer=0)
    return memory_of(sizes, how, tokens, RANKS, found["messages"], exchanged)


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    rows, ratios, kept = [], [], []
    for found in record["runs"]:
        memory = predicted(found)
        ratio = memory.step / found["growth"]
        ratios.append(ratio)
        kept.append(memory.step / found["with_kept_blocks"])
        parts = ("gradients", "checkpoints", "attention", "tiles", "messages")
        rows.append(
            [
                found["model"],
                f"{found['tokens']:,}",
                found["label"],
                *(f"{x / 2**20:.0f}" for x in (memory.step, found["growth"])),
                f"{ratio:.2f}",
                f"{kept[-1]:.2f}",
                f"{(found['growth'] - memory.step) / 2**20:.0f}",
                *(f"{getattr(memory, name) / 2**20:.0f}" for name in parts),
                found["date"],
            ]
        )
    head = ["model", "tokens", "strategy", "predicted, MiB", "measured, MiB", "ratio"]
    head += ["ratio, freed blocks kept", "missing, MiB", *parts, "date"]
    about = record["setup"]
    lines = [
        "# The memory of a step, predicted and measured",
        "",
        f"Forward and backward on {RANKS} CPU ranks, one thread each, "
        f"{about['inner']}, float32; {setup_text(about)}. Measured: growth of rank 0 "
        "over what is there before the step, gradients being None; the larger of two "
        "steps. Blocks of 1 MiB or more go back to the system when they are freed, as "
        "they do to the allocator of an accelerator; the last ratio is with blocks of "
        "up to 32 MiB kept by malloc, as it does by default once it has freed one. "
        "Predicted: `Memory.step` of `cp.fit`'s model of memory, whose parts at the "
        "predicted peak are the last columns. Printed by `tools/in_venv python -m "
        "tools.bench memory --fit`.",
        "",
        *markdown_table(head, rows),
        "",
        f"The target is a ratio within {TARGET:.0%} of 1. {_count(ratios)}; with "
        f"freed blocks kept, {_count(kept)}. What is missing there are no tensors "
        "but pages of freed blocks. When gradients exist in the model was corrected by "
        "the blocks that were alive at the peaks with 4,096 and 8,192 tokens.",
    ]
    done = {(x["model"], x["tokens"]) for x in record["runs"]}
    left = [f"{m} {n:,}" for m in MODELS for n in LENGTHS if (m, n) not in done]
    if left:
        lines += ["", f"Not measured: {', '.join(left)}."]
    return "\n".join([*lines, ""])


def _count(ratios: list[float]) -> str:
    """Count how many ratios meet the target, and give their range."""
    within = sum(abs(x - 1) <= TARGET for x in ratios)
    return f"{within} of {len(ratios)} are ({min(ratios):.2f} to {max(ratios):.2f})"
