"""Measure models with state-space layers and gated delta rules, by every strategy.

A small model of each family of transformers is trained on two ranks with its mixers
exchanged, with states passed on, gathered, and by the cost model's choice; and in eager
on one process. Steps take turns, so that what else the machine does meets all of them.
Work is the processor time of the busiest rank, over that of the same model in eager on
as many cores at once, because cores that share caches and memory slow each other down;
seconds are those of one process alone; memory is what a step grows by.
Results go to docs/results/bench_mixers.*.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from tests.models.torchvision_schemas import define_schemas
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.bench.resident import give_back_freed_blocks, peak, reset_peak
from tools.results import RESULTS, markdown_table, setup, setup_text, write_report

RANKS = 2
ONE = "one process"
EACH = "one on each core"
STRATEGIES = ("auto", "exchange", "states", "gather")
_WORDS = 512
_SIZES: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
    "mamba_expand": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
_NO_ATTENTION: dict[str, Any] = {
    "vocab_size": _WORDS,
    "hidden_size": 256,
    "num_hidden_layers": 2,
}
_MAMBA: dict[str, Any] = _NO_ATTENTION | {"hidden_size": 64, "state_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": _SIZES | _DELTA,
    "Qwen3_5MoeText": _SIZES | _DELTA | _EXPERTS,
    "Qwen3Next": _SIZES | _DELTA | _EXPERTS,
    "OlmoHybrid": _SIZES | _DELTA | {"linear_num_value_heads": 4},
    "KimiLinear": {
        **(_SIZES | _LATENT),
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "head_dim": 32,
        "n_routed_experts": 2,
        "first_k_dense_replace": 2,
    },
    "BailingHybrid": _SIZES | _LATENT | {"layer_group_size": 2},
    "MiniMax": {
        **_SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "head_dim": 64,
        "block_size": 64,
    },
    "Bamba": _SIZES | _MAMBA2 | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": {
        **(_SIZES | _MAMBA2),
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 512,
    },
    "FalconH1": _SIZES | _MAMBA2 | {"mamba_d_ssm": 512},
    "NemotronH": {
        **_SIZES,
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": 64,
        "ssm_state_size": 32,
        "n_groups": 1,
        "chunk_size": 64,
    },
    "Zamba2": {
        **_SIZES,
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 32,
        "mamba_headdim": 64,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_expand": 2,
        "chunk_size": 64,
        "num_mem_blocks": 1,
        "use_shared_attention_adapter": False,
    },
    "Mamba2": {
        **_NO_ATTENTION,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 32,
        "chunk_size": 64,
    },
    "Mamba": _MAMBA,
    "FalconMamba": _MAMBA,
    "Jamba": {
        **(_SIZES | {"hidden_size": 64, "intermediate_size": 128}),
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
    "RecurrentGemma": {
        **_SIZES,
        "lru_width": 256,
        "block_types": ["recurrent", "attention"],
        "attention_window_size": 512,
    },
    "Lfm2": _SIZES | {"layer_types": ["conv", "full_attention"]},
    "Rwkv": _NO_ATTENTION | {"attention_hidden_size": 256, "context_length": 2048},
    "xLSTM": {
        **_NO_ATTENTION,
        "embedding_dim": 256,
        "num_heads": 4,
        "num_blocks": 2,
        "chunk_size": 64,
        "mode": "train",
    },
}


# What these run in torch takes time quadratic in the tokens, or a loop over them.
# Scans in torch take memory quadratic in tokens, and a loop over tokens is unrolled.
_MOST_TOKENS = {"Mamba": 512, "FalconMamba": 512, "Jamba": 512, "RecurrentGemma": 128}


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each way")
    parser.add_argument("--inner", default="aot_eager", help="or inductor")
    parser.add_argument(
        "--family", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    about = setup(seq=given.seq, rounds=given.rounds, inner=given.inner)
    record: dict[str, Any] = {"setup": about, "runs": []}
    for family in given.family:
        found: dict[str, Any] = {"rounds": [], "compiled": []}
        tokens = min(given.seq, _MOST_TOKENS.get(family, given.seq))
        events = in_processes(RANKS, measure, family, tokens, given.rounds, given.inner)
        collect(found, events, len(STRATEGIES) + given.rounds)
        record["runs"].append({"family": family, "tokens": tokens, **found})
        written = write_report(given.out, "bench_mixers", record, markdown)
    print(written)


def measure(
    put: Callable[[Event], None], family: str, tokens: int, rounds: int, inner: str
) -> None:
    """Measure on every rank; rank 0 puts what it compiled, and each round, by way."""
    give_back_freed_blocks()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = make(family)
    config.outputs = ["loss"]
    torch.manual_seed(1)
    ids = torch.randint(2, _WORDS, (1, tokens))
    ways: dict[str, Callable[..., Any]] = {ONE: model, EACH: model}
    for strategy in STRATEGIES:
        options = {
            "mesh": mesh,
            "inner": inner,
            "strategy": strategy,
        }
        ways[strategy] = torch.compile(model, backend="cp", options=options)
        start = time.process_time()
        loss = step(model, ways[strategy], ids)
        seconds = time.process_time() - start
        put(("compiled", {"way": strategy, "seconds": seconds, "loss": loss}))
        put(("step", f"{family}, {strategy}: compiled"))
    for number in range(rounds):
        figures = {}
        for way, call in ways.items():
            dist.barrier()
            if way == ONE and dist.get_rank():
                continue
            figures[way] = figures_of(lambda c=call: step(model, c, ids))
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, figures)
        worst = {
            way: {
                key: max(x[way][key] for x in everyone if way in x)
                for key in everyone[0][way]
            }
            for way in everyone[0]
        }
        put(("rounds", worst))
        put(("step", f"{family}: round {number}"))


def make(family: str) -> nn.Module:
    """Make a model of a family of transformers, with weights that are always equal."""
    define_schemas()  # before transformers imports torchvision
    import transformers  # slow, and needed here alone

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config).train()  # type: ignore[no-any-return]


def step(model: nn.Module, call: Callable[..., Any], ids: torch.Tensor) -> float:
    """Run forward and backward; return the loss."""
    model.zero_grad()
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def figures_of(run: Callable[[], Any]) -> dict[str, float]:
    """Return seconds, processor seconds and the growth of memory of a call."""
    before = reset_peak()
    start, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "processor": time.process_time() - cpu,
        "seconds": time.perf_counter() - start,
        "bytes": peak() - before,
    }


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    about = record["setup"]
    rows = []
    for run in record["runs"]:
        compiled = {x["way"]: x["seconds"] for x in run["compiled"]}
        losses = {x["loss"] for x in run["compiled"]}
        for way in (ONE, EACH, *STRATEGIES):
            middle = {
                key: statistics.median(x[way][key] for x in run["rounds"])
                for key in ("processor", "seconds", "bytes")
            }
            ratios = {
                key: statistics.median(x[way][key] / x[of][key] for x in run["rounds"])
                for key, of in (("processor", EACH), ("seconds", ONE), ("bytes", ONE))
            }
            rows.append(
                [
                    run["family"],
                    str(run["tokens"]),
                    way,
                    f"{middle['processor']:.2f}",
                    f"{ratios['processor']:.2f}",
                    f"{ratios['seconds']:.2f}",
                    f"{middle['bytes'] / 2**20:.0f}",
                    f"{ratios['bytes']:.2f}",
                    f"{compiled[way]:.0f}" if way in compiled else "",
                    f"{max(losses) - min(losses):.0e}" if way == ONE else "",
                ]
            )
    head = [
        "family",
        "tokens",
        "way",
        "processor s",
        "to one on each core",
        "time to one process",
    ]
    head += ["MiB", "to one process", "s to compile", "losses differ by"]
    lines = [
        "# Mixers that are no attention",
        "",
        f"Forward and backward of models of two layers on {RANKS} CPU ranks of one "
        f"thread, {about['inner']}, against eager on one; "
        f"{setup_text(about)}; medians of {about['rounds']} steps of each way in "
        "turns. Processor seconds of the rank that uses most, over those of a whole "
        "model on every core at once, 0.5 is ideal; memory is what a step grows by. "
        "Printed by `tools/in_venv python -m tools.bench mixers`.",
        "",
        *markdown_table(head, rows),
    ]
    return "\n".join([*lines, ""])
