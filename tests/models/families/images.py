"""Models of images, of transformers and timm, and of images with texts."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn

from tests.models import case
from tests.models.case import (
    BATCH,
    VOCABULARY,
    Case,
    hub_model,
    random_ids,
    with_padding,
)

SIZES = case.SIZES | {"image_size": 48, "patch_size": 8}
TEXT = case.SIZES | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 77,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLIP = {"text_config": TEXT, "vision_config": SIZES, "projection_dim": 64}
PATCHES = 36


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
    return with_padding(texts(length))


def pairs(length: int) -> dict[str, Any]:
    """Images and their texts, for the contrastive loss."""
    return texts(length) | pixels(length) | {"return_loss": True}


def _hub(name: str, stem: str, head: str = "Model", **sizes: Any) -> Case:
    more = {"num_labels": 10} if "Classification" in head else {}
    inputs = pixels_and_classes if more else pixels
    made = functools.partial(hub_model, stem, stem + head, SIZES | more | sizes)
    return Case(name, "transformers", made, inputs, lengths=(PATCHES,))


def _timm(name: str, family: str, **more: Any) -> Case:
    inputs = functools.partial(pixels, name="x")
    made = functools.partial(timm_model, family, **more)
    return Case(name, "timm", made, inputs, lengths=(PATCHES,))


def _clip(name: str, part: str, sizes: Any, inputs: Any, *shard: str) -> Case:
    made = functools.partial(hub_model, f"CLIP{part}", f"CLIP{part}Model", sizes)
    return Case(f"clip/{name}", "transformers", made, inputs, dict.fromkeys(shard, 1))


CASES = [
    _hub("vit/classes", "ViT", "ForImageClassification"),
    _hub("vit/features", "ViT"),
    _hub("dinov2/registers", "Dinov2WithRegisters", num_register_tokens=4),
    _hub("siglip/vision", "SiglipVision"),
    _hub("clip/vision", "CLIPVision"),
    _clip("text", "Text", TEXT, texts, "input_ids"),
    _clip("text_padded", "Text", TEXT, padded_texts, "input_ids", "attention_mask"),
    _clip("pairs", "", CLIP, pairs, "input_ids"),
    _timm("timm_vit/token", "VisionTransformer"),
    _timm("timm_vit/mean", "VisionTransformer", global_pool="avg", class_token=False),
    _timm("timm_eva/rope", "Eva", use_rot_pos_emb=True),
]
