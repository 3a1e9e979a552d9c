"""Language models of transformers that mix tokens by other means than attention alone.

State-space models, gated delta rules, linear attention, convolutions and recurrences,
most of them in layers beside softmax attention. Chunks are short, so that a sequence
has several, and a key/value cache is not made.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn

from tests.models.case import VOCABULARY, Case, hub_model
from tests.models.families.decoders import (
    GROUPED,
    LATENT,
    loop_over_experts,
    no_cache,
)

CHUNK = 8
NO_CACHE = {"use_cache": False}
HYBRID = GROUPED | NO_CACHE
BARE = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, **NO_CACHE}
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA_RULE = {
    **LINEAR,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SCAN = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": CHUNK,
}

# name -> class (without Config), configuration
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", BARE | {"state_size": 8}),
    "mamba2": (
        "Mamba2",
        BARE
        | {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1}
        | {"chunk_size": CHUNK, "pad_token_id": 0, "bos_token_id": 1}
        | {"eos_token_id": 2},
    ),
    "falcon_mamba": ("FalconMamba", BARE | {"state_size": 8}),
    "jamba": (
        "Jamba",
        HYBRID
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
        | {"expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False},
    ),
    "bamba": ("Bamba", HYBRID | SCAN | {"attn_layer_indices": [1], "mamba_expand": 2}),
    "zamba2": (
        "Zamba2",
        HYBRID
        | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]}
        | {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 8}
        | {"mamba_ngroups": 1, "mamba_expand": 2, "chunk_size": CHUNK}
        | {"num_mem_blocks": 1, "use_shared_attention_adapter": False},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        HYBRID
        | SCAN
        | {"layer_types": ["mamba", "attention"], "mamba_expand": 2}
        | {"num_local_experts": 0, "shared_intermediate_size": 96},
    ),
    "falcon_h1": ("FalconH1", HYBRID | SCAN | {"mamba_d_ssm": 128}),
    "nemotron_h": (
        "NemotronH",
        HYBRID
        | {"layers_block_type": ["mamba", "attention"], "head_dim": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
        | {"n_groups": 1, "chunk_size": CHUNK},
    ),
    "qwen3_next": (
        "Qwen3Next",
        HYBRID | DELTA_RULE | EXPERTS | {"mlp_only_layers": [0]},
    ),
    "qwen3_5": ("Qwen3_5Text", HYBRID | DELTA_RULE),
    "qwen3_5_moe": ("Qwen3_5MoeText", HYBRID | DELTA_RULE | EXPERTS),
    "olmo_hybrid": (
        "OlmoHybrid",
        HYBRID
        | LINEAR
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 16},
    ),
    "kimi_linear": (
        "KimiLinear",
        HYBRID
        | LINEAR
        | LATENT
        | {"linear_num_heads": 4, "linear_head_dim": 16}
        | {"q_lora_rank": None, "head_dim": 8}
        | {"num_experts": 2, "n_routed_experts": 2, "first_k_dense_replace": 2}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 32},
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        HYBRID | LATENT | {"layer_group_size": 2, "q_lora_rank": None},
    ),
    "minimax": (
        "MiniMax",
        HYBRID
        | LINEAR
        | {"num_local_experts": 2, "num_experts_per_tok": 1}
        | {"head_dim": 16, "block_size": CHUNK},
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        HYBRID
        | {"lru_width": 64, "block_types": ["recurrent", "attention"]}
        | {"attention_window_size": 16},
    ),
    "lfm2": ("Lfm2", HYBRID | {"layer_types": ["conv", "full_attention"]}),
    "rwkv": ("Rwkv", BARE | {"attention_hidden_size": 64, "context_length": 128}),
    "xlstm": (
        "xLSTM",
        BARE
        | {"embedding_dim": 64, "num_heads": 4, "num_blocks": 2}
        | {"chunk_size": CHUNK, "mode": "train"},
    ),
}
NO_ATTENTION = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
WITH_EXPERTS = ("jamba", "qwen3_next", "qwen3_5_moe", "kimi_linear", "minimax")


def model(name: str) -> nn.Module:
    """The model with its language modelling head, without dropout."""
    stem, sizes = CONFIGS[name]
    how = {} if name in NO_ATTENTION else {"attn_implementation": "sdpa"}
    return hub_model(stem, "AutoModelForCausalLM", sizes, **how)


# xLSTM takes whole chunks only.
LENGTHS = {"xlstm": (40, 64)}

CASES = [
    Case(
        name=f"{name}/default",
        library="transformers",
        model=functools.partial(model, name),
        inputs=no_cache,
        shard={"input_ids": 1, "labels": 1},
        lengths=LENGTHS.get(name, (37, 64)),
        in_double=loop_over_experts if name in WITH_EXPERTS else None,
        attention=name not in NO_ATTENTION,
        mixers=True,
    )
    for name in CONFIGS
]
