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
    SIZES,
    VOCABULARY,
    Case,
    hub_model,
    packed_positions,
    with_labels,
    with_padding,
)
from tests.support.forms.flex_forms import gradients_on_cpu

transformers.logging.set_verbosity_error()

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MLP = SIZES | TOKENS | {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
BARE = {name: x for name, x in MLP.items() if name != "intermediate_size"}
GROUPED = MLP | {"num_key_value_heads": 2}
WINDOWS = {"sliding_window": 8}
MIXED = WINDOWS | {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
ROUTED = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}

# name -> class (without Config), configuration
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 16}),
    "mistral": ("Mistral", GROUPED | WINDOWS),
    "gemma2": ("Gemma2", GROUPED | MIXED | {"head_dim": 16}),
    "gemma3": ("Gemma3Text", GROUPED | MIXED | {"head_dim": 16}),
    "phi3": ("Phi3", GROUPED),
    "gpt2": ("GPT2", GPT | TOKENS | {"n_positions": 128}),
    "gpt_neox": ("GPTNeoX", MLP),
    "opt": ("OPT", BARE | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("Falcon", BARE),
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
        MLP | ROUTED | GROUPS | LATENT | {"q_lora_rank": 24},
    ),
    "gpt_oss": (
        "GptOss",
        GROUPED | EXPERTS | MIXED | {"head_dim": 16, "num_local_experts": 4},
    ),
}


def model(name: str, **changes: Any) -> nn.Module:
    """The model with its language modelling head, without dropout."""
    stem, sizes = CONFIGS[name]
    return hub_model(stem, "AutoModelForCausalLM", sizes | changes)


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


def padded(length: int, left: bool = True) -> dict[str, Any]:
    """Rows of different lengths."""
    given = with_padding(with_labels(length), left)
    hidden = given["attention_mask"] == 0
    return given | {"labels": given["labels"].masked_fill(hidden, -100)}


def packed(length: int) -> dict[str, Any]:
    """Two documents in a row, which do not see each other.

    With a cache transformers would not look whether positions begin anew.
    """
    given = no_cache(length)
    return given | {"position_ids": packed_positions(given["input_ids"])}


# A key/value cache is made by default. Without one the mask is written out as a
# tensor, though it is causal.
default = with_labels
no_cache = functools.partial(with_labels, use_cache=False)
# Of each kind of call its inputs, those with a sequence beside ids and labels, and
# models. Padding on the left makes bloom NaN in float32 on one process too: its mask
# becomes -inf.
KINDS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "default": (default, (), tuple(CONFIGS)),
    "no_cache": (no_cache, (), ("llama", "mistral", "gpt2", "gemma3")),
    "padded": (
        *(padded, ("attention_mask",)),
        ("llama", "qwen2", "mistral", "gemma3", "gpt2", "opt", "falcon"),
    ),
    "padded_right": (
        *(functools.partial(padded, left=False), ("attention_mask",)),
        ("bloom",),
    ),
    "packed": (packed, ("position_ids",), ("llama", "qwen3")),
}


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
    inputs, more, _ = KINDS[kind]
    return Case(
        name=f"{name}/{kind}",
        library="transformers",
        model=functools.partial(model, name),
        inputs=inputs,
        shard=dict.fromkeys(("input_ids", "labels", *more), 1),
        in_double=loop_over_experts if experts else None,
    )


CASES = [
    *(_case(name, kind) for kind, (_, _, names) in KINDS.items() for name in names),
    *(_flex("llama", kind) for kind in ("default", "padded")),
]
