"""Causal language models of transformers, as they come, in small."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.nn as nn
import transformers
from torch.nn.attention.flex_attention import flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

from tests.models.case import (
    VOCABULARY,
    Case,
    packed_positions,
    padding_mask,
    random_ids,
    uneven_labels,
    without_dropout,
)
from tests.support.forms.flex_forms import gradients_on_cpu

transformers.logging.set_verbosity_error()

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    **HEADS,
}
MLP = SIZES | TOKENS | {"intermediate_size": 96}
GROUPED = MLP | {"num_key_value_heads": 2}
WINDOWS = {"sliding_window": 8}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}

# name -> class (without Config and ForCausalLM), configuration
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "mistral": ("Mistral", GROUPED | WINDOWS),
    "gemma2": ("Gemma2", GROUPED | MIXED | {"head_dim": 16}),
    "gemma3": ("Gemma3", GROUPED | MIXED | {"head_dim": 16}),
    "phi3": ("Phi3", GROUPED),
    "gpt2": ("GPT2", GPT | TOKENS | {"n_positions": 128}),
    "gpt_neox": ("GPTNeoX", MLP),
    "opt": ("OPT", SIZES | TOKENS | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("Falcon", SIZES | TOKENS),
    "bloom": (
        "Bloom",
        {**TOKENS, "vocab_size": VOCABULARY, "hidden_size": 64, "n_head": 4},
    ),
    "olmo2": ("Olmo2", GROUPED),
    "mixtral": (
        "Mixtral",
        GROUPED | EXPERTS | {"num_local_experts": 4, "output_router_logits": True},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        GROUPED | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 32},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        MLP
        | EXPERTS
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 24}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    ),
    "gpt_oss": (
        "GptOss",
        GROUPED | EXPERTS | MIXED | {"head_dim": 16, "num_local_experts": 4},
    ),
}
_CLASSES = {"Gemma3Config": "Gemma3TextConfig"}
_HEADS = {"GPT2ForCausalLM": "GPT2LMHeadModel"}


def model(name: str, **changes: Any) -> nn.Module:
    """The model with its language modelling head, without dropout."""
    stem, sizes = CONFIGS[name]
    config = _CLASSES.get(f"{stem}Config", f"{stem}Config")
    head = _HEADS.get(f"{stem}ForCausalLM", f"{stem}ForCausalLM")
    made = without_dropout(getattr(transformers, config)(**sizes | changes))
    module: nn.Module = getattr(transformers, head)(made)
    return module.train()


def loop_over_experts(module: Any) -> None:
    """torch's grouped products, by which experts are computed, have no float64."""
    set_experts(module, "eager")


def set_experts(module: Any, how: str) -> None:
    """Have a model, or the parts of it that have any, compute its experts so."""
    for part in filter(has_experts, module.modules()):
        part.set_experts_implementation(how)


def has_experts(part: Any) -> bool:
    """Tell whether a module of transformers may compute experts in several ways."""
    return bool(getattr(part, "_can_set_experts_implementation", lambda: False)())


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Outside of a compiled model transformers compiles flex_attention by Inductor,
    which has no gradients of it on a CPU; torch's plain implementation has."""
    plain = mock.patch.object(
        WrappedFlexAttention, "__call__", lambda _: flex_attention
    )
    with gradients_on_cpu(), plain:
        yield


def default(length: int) -> dict[str, Any]:
    """As in most training loops; a key/value cache is made by default."""
    ids = random_ids(length)
    return {"input_ids": ids, "labels": uneven_labels(ids)}


def no_cache(length: int) -> dict[str, Any]:
    """The mask is written out as a tensor then, though it is causal."""
    return default(length) | {"use_cache": False}


def padded(length: int, left: bool = True) -> dict[str, Any]:
    """Rows of different lengths."""
    given = default(length)
    mask = padding_mask(given["input_ids"], left)
    given["labels"] = given["labels"].masked_fill(mask == 0, -100)
    return given | {"attention_mask": mask}


def packed(length: int) -> dict[str, Any]:
    """Two documents in a row, which do not see each other.

    With a cache transformers would not look whether positions begin anew.
    """
    given = no_cache(length)
    return given | {"position_ids": packed_positions(given["input_ids"])}


KINDS = {
    "default": default,
    "no_cache": no_cache,
    "padded": padded,
    "padded_right": functools.partial(padded, left=False),
    "packed": packed,
}
MORE_INPUTS = {
    "padded": ["attention_mask"],
    "padded_right": ["attention_mask"],
    "packed": ["position_ids"],
}
PADDED = ("llama", "qwen2", "mistral", "gemma3", "gpt2", "opt", "falcon")
# Padding on the left is NaN in float32 on one process too: its mask becomes -inf.
PADDED_RIGHT = ("bloom",)
NO_CACHE = ("llama", "mistral", "gpt2", "gemma3")
PACKED = ("llama", "qwen3")
FLEX = (("llama", "default"), ("llama", "padded"))


def _flex(name: str, kind: str) -> Case:
    case = _case(name, kind)
    return replace(
        case,
        name=case.name.replace("/", "/flex_"),
        model=functools.partial(model, name, attn_implementation="flex_attention"),
        around=flex_on_cpu,
    )


def _case(name: str, kind: str) -> Case:
    experts = "num_experts_per_tok" in CONFIGS[name][1]
    return Case(
        name=f"{name}/{kind}",
        library="transformers",
        model=functools.partial(model, name),
        inputs=KINDS[kind],
        shard=dict.fromkeys(["input_ids", "labels", *MORE_INPUTS.get(kind, [])], 1),
        in_double=loop_over_experts if experts else None,
    )


CASES = [
    *(_case(name, "default") for name in CONFIGS),
    *(_case(name, "no_cache") for name in NO_CACHE),
    *(_case(name, "padded") for name in PADDED),
    *(_case(name, "padded_right") for name in PADDED_RIGHT),
    *(_case(name, "packed") for name in PACKED),
    *(_flex(*call) for call in FLEX),
]
