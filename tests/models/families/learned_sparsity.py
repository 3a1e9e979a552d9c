"""Models whose queries see keys that an indexer chooses, or sums of windows of keys."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.models.case import VOCABULARY, Case, hub_model, without_dropout
from tests.models.families.decoders import (
    BARE,
    GROUPS,
    LATENT,
    MLP,
    ROUTED,
    loop_over_experts,
    no_cache,
)

INDEXER = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 2}
CHOSEN = MLP | ROUTED | GROUPS | LATENT | INDEXER | {"head_dim": 8}
COMPRESSED = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 8,
    # Larger than by default: streams that are nearly equal leave gradients that cancel.
    "initializer_range": 0.1,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 8,
    "num_nextn_predict_layers": 0,
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
    ],
    "compress_rates": {
        "heavily_compressed_attention": 8,
        "compressed_sparse_attention": 4,
    },
}

# name -> class (without Config), configuration
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", CHOSEN | {"q_lora_rank": 24}),
    "deepseek_v4": (
        "DeepseekV4",
        BARE | ROUTED | COMPRESSED | INDEXER | {"index_topk": 4},
    ),
    "glm_moe_dsa": ("GlmMoeDsa", CHOSEN | {"q_lora_rank": 24}),
}


class MistralLarge4(nn.Module):
    """Its text model with a head; transformers has one for images and text alone."""

    def __init__(self) -> None:
        super().__init__()
        config = without_dropout(transformers.MistralLarge4TextConfig(**CHOSEN))
        self.model = transformers.MistralLarge4TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)

    def set_experts_implementation(self, name: str) -> None:
        """As PreTrainedModel has it."""
        self.model.set_experts_implementation(name)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutputWithPast:
        found = self.model(input_ids=input_ids, use_cache=use_cache)
        logits = self.lm_head(found.last_hidden_state)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def model(name: str) -> nn.Module:
    """The model with its language modelling head, without dropout."""
    if name == "mistral_large4":
        return MistralLarge4().train()
    stem, sizes = CONFIGS[name]
    return hub_model(stem, "AutoModelForCausalLM", sizes)


CASES = [
    Case(
        name=f"{name}/default",
        library="transformers",
        model=functools.partial(model, name),
        inputs=no_cache,
        shard={"input_ids": 1, "labels": 1},
        in_double=loop_over_experts,
    )
    for name in (*CONFIGS, "mistral_large4")
]
