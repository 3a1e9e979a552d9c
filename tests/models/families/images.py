"""Models of images, of transformers and timm, and of images with texts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
import transformers

from tests.models.case import (
    BATCH,
    VOCABULARY,
    Case,
    padding_mask,
    random_ids,
    without_dropout,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 48,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 77,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {"text_config": TEXT, "vision_config": SIZES, "projection_dim": 64}
PATCHES = 36


def model(config: str, head: str, sizes: dict[str, Any]) -> nn.Module:
    """A model by the names of its classes in transformers, without dropout."""
    made = without_dropout(getattr(transformers, config)(**sizes))
    module: nn.Module = getattr(transformers, head)(made)
    return module.train()


def timm_model(family: str, **more: Any) -> nn.Module:
    """A VisionTransformer or an Eva of timm."""
    import timm.models as families  # slow: it imports every model it has

    sizes = {"img_size": 48, "patch_size": 8, "embed_dim": 64, "depth": 2}
    made: nn.Module = getattr(families, family)(
        **sizes, num_heads=4, num_classes=10, **more
    )
    return made.train()


def pixels(_: int, name: str = "pixel_values") -> dict[str, Any]:
    """Images of 6 x 6 patches."""
    return {name: torch.randn(BATCH, 3, 48, 48)}


def pixels_and_classes(length: int) -> dict[str, Any]:
    """Images, each with the number of its class."""
    return pixels(length) | {"labels": torch.randint(0, 10, (BATCH,))}


def texts(length: int) -> dict[str, Any]:
    """Token ids that end with the token that is pooled."""
    ids = random_ids(length)
    ids[:, -1] = 2
    return {"input_ids": ids}


def padded_texts(length: int) -> dict[str, Any]:
    """Texts of different lengths."""
    given = texts(length)
    return given | {"attention_mask": padding_mask(given["input_ids"])}


def pairs(length: int) -> dict[str, Any]:
    """Images and their texts, for the contrastive loss."""
    return texts(length) | pixels(length) | {"return_loss": True}


def _hub(name: str, config: str, head: str, **sizes: Any) -> Case:
    more = {"num_labels": 10} if "Classification" in head else {}
    inputs = pixels_and_classes if more else pixels
    made = functools.partial(model, config, head, SIZES | more | sizes)
    return Case(name, "transformers", made, inputs, lengths=(PATCHES,))


def _timm(name: str, family: str, **more: Any) -> Case:
    inputs = functools.partial(pixels, name="x")
    made = functools.partial(timm_model, family, **more)
    return Case(name, "timm", made, inputs, lengths=(PATCHES,))


def _clip_text(name: str, inputs: Any, shard: dict[str, int]) -> Case:
    made = functools.partial(model, "CLIPTextConfig", "CLIPTextModel", TEXT)
    return Case(name, "transformers", made, inputs, shard)


CASES = [
    _hub("vit/classes", "ViTConfig", "ViTForImageClassification"),
    _hub("vit/features", "ViTConfig", "ViTModel"),
    _hub(
        "dinov2/registers",
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersModel",
        num_register_tokens=4,
    ),
    _hub("siglip/vision", "SiglipVisionConfig", "SiglipVisionModel"),
    _hub("clip/vision", "CLIPVisionConfig", "CLIPVisionModel"),
    _clip_text("clip/text", texts, {"input_ids": 1}),
    _clip_text("clip/text_padded", padded_texts, {"input_ids": 1, "attention_mask": 1}),
    Case(
        "clip/pairs",
        "transformers",
        functools.partial(model, "CLIPConfig", "CLIPModel", CLIP),
        pairs,
        {"input_ids": 1},
    ),
    _timm("timm_vit/token", "VisionTransformer"),
    _timm("timm_vit/mean", "VisionTransformer", global_pool="avg", class_token=False),
    _timm("timm_eva/rope", "Eva", use_rot_pos_emb=True),
]
