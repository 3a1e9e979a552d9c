"""Vision-language models of transformers, tiny, with images in their prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

BATCH, TOKENS, FEATURES = 2, 37, 4
IMAGE, START, END, VIDEO = 63, 62, 61, 60
WIDTHS: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
TEXT = WIDTHS | {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
# of other heads than the text
TOWER = WIDTHS | {"num_hidden_layers": 1, "num_attention_heads": 2}
# Rotary positions of three dimensions: of time, height and width.
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_TOWER = WIDTHS | {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
INDICES = {
    "image_token_index": IMAGE,
    "boi_token_index": START,
    "eoi_token_index": END,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
QWEN_IDS = IDS | {"vision_start_token_id": START, "vision_end_token_id": END}


def tower(size: int, **more: Any) -> dict[str, Any]:
    """For images of patches of 4 x 4."""
    return TOWER | {"image_size": size, "patch_size": 4} | more


def prompts(first: int = 5) -> dict[str, Tensor]:
    """Rows with an image of four tokens, from the `first` on, which have no labels."""
    ids = torch.randint(0, VIDEO, (BATCH, TOKENS))
    ids[:, first : first + FEATURES] = IMAGE
    return {"input_ids": ids, "labels": ids.masked_fill(ids >= VIDEO, -100)}


def image(size: int, *more: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(BATCH, *more, 3, size, size)}


Inputs = dict[str, Tensor]


def of(name: str, inputs: Inputs, **given: Any) -> tuple[nn.Module, Inputs]:
    """A model of transformers by its name, of which the text has the sizes of TEXT."""
    import transformers

    given["text_config"] = TEXT | given["text_config"]
    config = getattr(transformers, f"{name}Config")(**given)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config), inputs


def qwen2_5_vl() -> tuple[nn.Module, Inputs]:
    tower = {**QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]}
    parts = {"text_config": {"rope_parameters": ROPE}, "vision_config": tower}
    return of("Qwen2_5_VL", of_qwen(), **parts, **QWEN_IDS)


def qwen3_vl() -> tuple[nn.Module, Inputs]:
    """Features of a lower block are added to hidden states of a layer, too."""
    tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    text = {"head_dim": 8, "rope_parameters": ROPE}
    parts = {"text_config": text, "vision_config": QWEN_TOWER | tower}
    return of("Qwen3VL", of_qwen(), **parts, **QWEN_IDS)


def of_qwen() -> Inputs:
    """Patches of an image, whose size is data."""
    inputs = prompts()
    inputs["input_ids"][:, 4] = START
    return inputs | {
        "pixel_values": torch.randn(16 * BATCH, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "mm_token_type_ids": of_images(inputs),
    }


def of_images(inputs: Inputs) -> Tensor:
    """1 for tokens of images, 0 for others."""
    return (inputs["input_ids"] == IMAGE).long()


def gemma3() -> tuple[nn.Module, Inputs]:
    """Tokens of an image see each other both ways."""
    inputs = prompts() | image(16)
    inputs["token_type_ids"] = of_images(inputs)
    text = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
    parts = {"text_config": text, "vision_config": tower(16)}
    return of("Gemma3", inputs, **parts, **INDICES, mm_tokens_per_image=FEATURES)


def gemma4() -> tuple[nn.Module, Inputs]:
    """Patches come with their places, and how many tokens they give is data."""
    text = {
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "sliding_window": 16,
        "pad_token_id": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": "vision",
    }
    of_tower = TOWER | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pooling_kernel_size": 2,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)
    inputs = prompts()
    inputs |= {
        "pixel_values": torch.randn(BATCH, 16, 3 * 4 * 4),
        "image_position_ids": places.expand(BATCH, -1, -1).clone(),
        "mm_token_type_ids": of_images(inputs),
    }
    ids = IDS | {"boi_token_id": START, "eoi_token_id": END}
    return of("Gemma4", inputs, text_config=text, vision_config=of_tower, **ids)


def paligemma() -> tuple[nn.Module, Inputs]:
    """The prompt is seen both ways, the answer causally."""
    inputs = prompts(first=0) | image(8)
    inputs["token_type_ids"] = torch.ones_like(inputs["input_ids"])
    inputs["token_type_ids"][:, :8] = 0
    return of(
        *("PaliGemma", inputs),
        text_config={"model_type": "gemma", "head_dim": 8},
        vision_config=tower(8, model_type="siglip_vision_model", projection_dim=32),
        image_token_index=IMAGE,
        projection_dim=32,
        hidden_size=32,
    )


def llava() -> tuple[nn.Module, Inputs]:
    model, inputs = of(
        *("Llava", prompts() | image(8)),
        text_config={"model_type": "llama"},
        vision_config=tower(8, model_type="clip_vision_model"),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
    )
    norm = model.get_submodule("model.vision_tower.post_layernorm")
    norm.requires_grad_(False)  # of no feature
    return model, inputs


def internvl() -> tuple[nn.Module, Inputs]:
    return of(
        *("InternVL", prompts() | image(16)),
        text_config={"model_type": "qwen2"},
        vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
        image_seq_length=FEATURES,
        downsample_ratio=0.5,
    )


def idefics3() -> tuple[nn.Module, Inputs]:
    """Images that are padding, all zeros, are left out: how many is data."""
    text = {"model_type": "llama", "pad_token_id": 0}
    parts = {"text_config": text, "vision_config": tower(16)}
    others = {"image_token_id": IMAGE, "scale_factor": 2, "pad_token_id": 0}
    return of("Idefics3", prompts() | image(16, 1), **parts, **others)


def llama4() -> tuple[nn.Module, Inputs]:
    """Layers of experts, which are given the tokens of all rows at once."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    text = {"head_dim": 8, "intermediate_size_mlp": 64, "attention_chunk_size": 16}
    dims = ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    sizes = dict.fromkeys(dims, 32) | {"intermediate_size": 128}
    of_tower = tower(16, pixel_shuffle_ratio=0.5, **sizes)
    parts = {"text_config": text | experts, "vision_config": of_tower}
    return of("Llama4", prompts() | image(16), **parts, **INDICES)


@dataclass(frozen=True)
class Family:
    """A model, and how it is trained.

    features: inputs of `get_image_features`, which is called before and reads data.
    in_eager: functions that are not compiled, because they read data.
    settings: of torch._dynamo.config. breaks: graph breaks that remain.
    work: of both ranks, without what runs in eager, over one device's.
    """

    make: Callable[[], tuple[nn.Module, Inputs]]
    features: tuple[str, ...] = ()
    in_eager: tuple[str, ...] = ()
    breaks: int = 0
    work: float = 1.06

    @property
    def settings(self) -> Mapping[str, bool]:
        nested = {"nested_graph_breaks": True} if self.breaks else {}
        return {"capture_dynamic_output_shape_ops": True, **nested}


_QWEN = ("pixel_values", "image_grid_thw")
_QWEN_IN_EAGER = ("model.visual.forward", "model.get_rope_index")
FAMILIES = {
    "llava": Family(llava),
    "internvl": Family(internvl),
    "gemma3": Family(gemma3),
    "gemma4": Family(gemma4, ("pixel_values", "image_position_ids")),
    "paligemma": Family(paligemma),
    "llama4": Family(llama4, work=1.5),
    "idefics3": Family(idefics3, ("pixel_values",)),
    "idefics3 in the graph": Family(idefics3, breaks=1),
    "qwen2_5_vl": Family(qwen2_5_vl, _QWEN),
    "qwen3_vl": Family(qwen3_vl, _QWEN),
    "qwen3_vl in eager": Family(qwen3_vl, in_eager=_QWEN_IN_EAGER, breaks=3),
}
