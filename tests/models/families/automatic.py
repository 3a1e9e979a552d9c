"""Every family of a library, in the smallest configuration that its class accepts.

A configuration is made from the names of its fields alone: what is called hidden_size
is 64 in all of them. All types of layers are there, each once. Nothing is written for
one family but what its class asks for by name.

A case is called "automatic/<kind>/<family>"; see KINDS. Those of transformers are made
here, the others by the module that is named after the kind.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from typing import Any

import torch
import torch.nn as nn
import transformers
from torch import Tensor
from transformers.models.auto import configuration_auto, modeling_auto

from tests.models.case import BATCH, Case, random_ids, without_dropout
from tests.models.families.automatic_sizes import (
    HEAD_DIM,
    HEADS,
    INNER,
    VOCABULARY,
    WIDTH,
    NoConfigurationError,
    accepted,
    parameters,
)
from tests.models.families.decoders import has_experts, loop_over_experts
from tests.models.torchvision_schemas import define_schemas

PREFIX = "automatic/"
CLASSES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}
KINDS = (*CLASSES, "diffusers", "timm")  # tasks of transformers, and other libraries
LENGTHS = (37, 64)
POSITIONS = 256

_SAME = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input entity_vocab_size "
    "encoder_hash_byte_group_vocab",
    WIDTH: "hidden_size d_model n_embd dim embed_dim embedding_size "
    "word_embed_proj_dim encoder_hidden_size hidden_dim model_dim lru_width "
    "emb_dim entity_emb_size d_latents hidden_size_global audio_hidden_size",
    2: "num_key_value_heads num_kv_heads num_global_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k n_group "
    "index_n_heads o_groups linear_num_key_heads type_vocab_size "
    "altup_num_inputs mamba_expand expert_layer_period num_expert_group "
    "num_self_attends_per_block num_filters indexer_n_heads",
    HEADS: "num_attention_heads n_head n_heads num_heads attention_heads "
    "encoder_attention_heads decoder_attention_heads num_local_experts "
    "num_experts n_routed_experts moe_num_experts linear_num_value_heads "
    "linear_conv_kernel_dim patch_size linear_num_heads "
    "num_self_attention_heads num_cross_attention_heads indexer_compress_ratio",
    1: "topk_group n_shared_experts num_shared_experts n_groups mamba_n_groups "
    "max_window_layers first_k_dense_replace indexer_kv_heads",
    0: "num_kv_shared_layers num_nextn_predict_layers",
    INNER: "intermediate_size ffn_dim n_inner encoder_ffn_dim ff_dim "
    "decoder_ffn_dim d_ff inner_dim ffn_hidden_size",
    32: "moe_intermediate_size shared_expert_intermediate_size "
    "expert_ffn_hidden_size moe_ffn_hidden_size",
    HEAD_DIM: "head_dim d_kv attention_head_dim global_head_dim v_head_dim "
    "kv_lora_rank qk_nope_head_dim index_head_dim o_lora_rank mamba_d_head "
    "mamba_d_state mamba_chunk_size mamba_head_dim chunk_size "
    "linear_key_head_dim linear_value_head_dim block_size "
    "hidden_size_per_layer_input attention_chunk_size linear_head_dim "
    "num_latents indexer_head_dim indexer_budget hc_lowrank",
    128: "mamba_d_ssm",
    24: "q_lora_rank qk_head_dim",
    12: "index_topk",
    8: "qk_rope_head_dim rotary_dim state_size ssm_state_size mamba_n_heads "
    "mamba_num_heads num_buckets laurel_rank sliding_window local_attention "
    "attention_window",
    3: "conv_L_cache",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_sequence_length "
    "max_seq_len seq_length max_source_positions max_target_positions",
}
_SIZES: dict[str, Any] = {
    name: n for n, names in _SAME.items() for name in names.split()
}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES |= {"decoder_start_token_id": 1}
_SIZES |= {"width_coefficient": 1.0, "depth_coefficient": 1.0}
_SIZES |= {"axial_pos_embds": False}  # which only one length of sequences fits
_UNSET = ("num_key_value_heads", "head_dim", "num_experts_per_tok")
_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)


def families(kind: str) -> list[str]:
    """Names of the families of a kind that the installed library has.

    Raises: ModuleNotFoundError, if none is installed.
    """
    return sorted(CLASSES[kind]) if kind in CLASSES else _library(kind).families()


def library_divides(name: str) -> bool | None:
    """Whether the library itself claims to divide the sequences of a family.

    That is `supports_context_parallel` in transformers, and a plan of the class in
    diffusers; timm has nothing of the kind, and gets None.

    Raises: NoConfigurationError.
    """
    kind, family = name.removeprefix(PREFIX).split("/")
    if kind not in CLASSES:
        says = getattr(_library(kind), "has_plan", None)
        return None if says is None else says(family)
    define_schemas()
    with torch.device("meta"):
        found: bool | None = getattr(
            _model(kind, family), "supports_context_parallel", None
        )
    return found


def _library(kind: str) -> Any:
    """The module that makes the models of another library; its import is slow."""
    define_schemas()
    return importlib.import_module(f"tests.models.families.automatic_{kind}")


@functools.lru_cache(maxsize=8)
def automatic_case(name: str) -> Case:
    """The case of a family, of a name that begins with PREFIX."""
    kind, family = name.removeprefix(PREFIX).split("/")
    define_schemas()
    if kind not in CLASSES:
        model, inputs = _library(kind).parts(family)
        return Case(name, kind, model, inputs, lengths=LENGTHS[:1])
    module = _model(kind, family)
    any_experts = any(map(has_experts, module.modules()))
    return Case(
        name=name,
        library="transformers",
        model=functools.partial(_model, kind, family),
        inputs=functools.partial(_inputs, kind, module),
        lengths=LENGTHS if kind != "images" else LENGTHS[:1],
        in_double=loop_over_experts if any_experts else None,
        always_labels=kind == "seq2seq",
    )


def _model(kind: str, family: str) -> nn.Module:
    """The model; fields without a number get one only if nothing else works."""
    try:
        return _with_sizes(kind, family, _UNSET)
    except NoConfigurationError:
        return _with_sizes(kind, family, tuple(_SIZES))


def _with_sizes(kind: str, family: str, unset: tuple[str, ...]) -> nn.Module:
    head = CLASSES[kind][family]
    head = head[0] if isinstance(head, tuple) else head
    try:
        model_class = getattr(transformers, head)
        config_class = model_class.config_class
        if not inspect.isclass(config_class):
            names = configuration_auto.CONFIG_MAPPING_NAMES
            config_class = getattr(transformers, names[family])
        config = _configuration(config_class, unset)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        if kind == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True
        for name in ("pad_token_id", "decoder_start_token_id"):
            if kind == "seq2seq" and getattr(config, name, None) is None:
                setattr(config, name, _SIZES[name])
        parameters(lambda: model_class(config))  # parts may have sizes of their own
        torch.manual_seed(0)
        model: nn.Module = model_class(config)
    except NoConfigurationError:
        raise
    except Exception as error:  # whatever a class makes of sizes that it does not like
        raise NoConfigurationError(f"{type(error).__name__}: {error}") from error
    return model.train()


def _configuration(config_class: Any, unset: tuple[str, ...]) -> Any:
    """Make the configuration; a field that the class refuses keeps its default.

    unset: fields that get a size although they have no number by default.
    """
    defaults = config_class().to_dict()
    sizes = {
        name: size
        for name, size in _SIZES.items()
        if isinstance(defaults.get(name), int | float)
        or (name in unset and name in defaults and defaults[name] is None)
    }
    stages = ("num_heads", "num_attention_heads", "hidden_sizes")
    if any(isinstance(defaults.get(x), list | tuple) for x in stages):
        sizes.pop("patch_size", None)  # which their strides go with
    if isinstance(defaults.get("num_heads"), list | tuple):  # of stages, widening
        sizes.pop("embed_dim", None)
        sizes.pop("hidden_size", None)
    names = ("layer_types", "layers_block_type")
    of_layers = next((x for x in names if defaults.get(x)), "layer_types")
    kinds = defaults.get(of_layers)
    if kinds is None and "conv_L_cache" in defaults:  # and no pattern of them
        kinds = ["conv", "full_attention"]
    layers = 2
    if isinstance(kinds, list | tuple) and kinds:
        several = list(dict.fromkeys(kinds))
        if several == ["linear_attention"]:  # the other type of a hybrid
            several.append("full_attention")
        layers = max(2, len(several))
        if of_layers == "layers_block_type" and "hybrid" in several:  # tied, if two
            layers *= 2
        sizes[of_layers] = (several * 2)[:layers]
        if defaults.get("rope_parameters") == {}:
            plain = {"rope_type": "default", "rope_theta": 10000.0}
            sizes["rope_parameters"] = dict.fromkeys(several, plain)
    sizes |= {name: layers for name in _LAYERS if isinstance(defaults.get(name), int)}
    for name, value in defaults.items():
        if name.endswith("attn_layer_indices"):
            sizes[name] = [layers - 1]
        elif name.endswith("_layer_period"):
            sizes[name] = layers
        elif name.endswith("_layer_offset"):
            sizes[name] = layers - 1
        endings = ("layer_types", "_layers", "block_types")
        if name == of_layers or not name.endswith(endings):
            continue
        if (
            isinstance(value, list)
            and len(value) > layers
            and value[0] in _words(value)
        ):
            sizes[name] = (_words(value) * 2)[:layers]
    if "kv_lora_rank" in defaults:  # latent attention has keys of every head
        sizes["num_key_value_heads"] = HEADS
    if "qk_rope_head_dim" in defaults and "head_dim" in sizes:
        sizes["head_dim"] = _SIZES["qk_rope_head_dim"]
    if "width_coefficient" in defaults:
        width = defaults["width_coefficient"]  # which its other channels go with
        sizes["hidden_dim"] = int(defaults["hidden_dim"] / width)
        sizes["initializer_range"] = 0.2  # or its batch norms see only their epsilon
    if "expand" in defaults and "num_heads" in sizes:  # of a state space
        sizes["num_heads"] = defaults["expand"] * WIDTH // HEAD_DIM
    if "default_language" in defaults:
        sizes["default_language"] = defaults["languages"][0]
    sizes |= _parts(config_class, defaults, unset)
    return without_dropout(accepted(config_class, sizes))


def _parts(
    config_class: Any, defaults: dict[str, Any], unset: tuple[str, ...]
) -> dict[str, Any]:
    """Make the configurations of parts, such as text and images."""
    parts = {}
    for name, part_class in getattr(config_class, "sub_configs", {}).items():
        kind = (defaults.get(name) or {}).get("model_type")
        if part_class is transformers.AutoConfig and kind:
            part_class = configuration_auto.CONFIG_MAPPING[kind]
        if kind is not None:
            parts[name] = _configuration(part_class, unset)
            parts[name].use_cache = False
    return parts


def _words(values: list[Any]) -> list[str]:
    """Return the words of a list, each once."""
    return [x for x in dict.fromkeys(values) if isinstance(x, str)]


def _inputs(kind: str, module: Any, length: int) -> dict[str, Any]:
    config = module.config
    ids = random_ids(length)
    if kind == "images":
        takes_ids = module.main_input_name == "input_ids"  # colors are tokens, or text
        inputs = {"input_ids": ids} if takes_ids else _images(module)
        return inputs | {"labels": torch.tensor([0, 1])}
    if kind == "seq2seq" and config.is_encoder_decoder:
        return {"input_ids": ids, "labels": random_ids(length - 8)}
    if books := getattr(module, "num_codebooks", None):  # one row of tokens for each
        ids = random_ids(length, BATCH * books)
        return {"input_ids": ids, "labels": ids.view(BATCH, books, -1).transpose(1, 2)}
    inputs = {"input_ids": ids, "labels": ids.clone()}
    if hasattr(config, "d_latents"):  # which are decoded to all positions
        inputs["labels"] = random_ids(config.max_position_embeddings)
    if hasattr(config, "num_image_with_embedding"):  # whose tokens come first
        inputs |= _images(module)
    return inputs


def _images(module: Any) -> dict[str, Tensor]:
    """Make images of the size that a configuration, or its part for them, says."""
    config = getattr(module.config, "vision_config", module.config)
    channels = getattr(config, "num_channels", 3)
    if "spatial_shapes" in inspect.signature(module.forward).parameters:
        side, patch = math.isqrt(config.num_patches), config.patch_size
        return {
            "pixel_values": torch.randn(BATCH, side**2, channels * patch**2),
            "pixel_attention_mask": torch.ones(BATCH, side**2, dtype=torch.long),
            "spatial_shapes": torch.full((BATCH, 2), side),
        }
    size = getattr(config, "image_size", 32)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": torch.randn(BATCH, channels, size, size)}
