"""Transformers of diffusion models, of diffusers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from tests.models.case import BATCH, Case

TEXT = 11  # tokens of the prompt
PATCHES = 36

HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
DIT = HEADS | {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "sample_size": 12,
    "patch_size": 2,
}
SD3 = DIT | {
    "joint_attention_dim": 48,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 40,
    "pos_embed_max_size": 12,
}
FLUX = HEADS | {
    "patch_size": 1,
    "in_channels": 4,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 48,
    "pooled_projection_dim": 40,
    "axes_dims_rope": (4, 4, 8),
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 48,
    "freq_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}


def model(name: str, sizes: dict[str, Any]) -> nn.Module:
    """A model by the name of its class."""
    import diffusers  # slow

    made: nn.Module = getattr(diffusers, name)(**sizes)
    return made.train()


def noise(*shape: int) -> dict[str, Any]:
    """Latents, and for each a time."""
    return {"hidden_states": torch.randn(BATCH, *shape)} | {
        "timestep": torch.randint(1, 900, (BATCH,))
    }


def dit(_: int) -> dict[str, Any]:
    """Latents and classes. Some classes are dropped at random in training."""
    return noise(4, 12, 12) | {"class_labels": torch.randint(0, 999, (BATCH,))}


def sd3(_: int) -> dict[str, Any]:
    """Latents and the prompt, which attend to each other."""
    return noise(4, 12, 12) | {
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 48),
        "pooled_projections": torch.randn(BATCH, 40),
    }


def flux(length: int) -> dict[str, Any]:
    """Latents that are tokens already, with positions of images and prompt."""
    return noise(length, 4) | {
        "encoder_hidden_states": torch.randn(BATCH, TEXT, 48),
        "pooled_projections": torch.randn(BATCH, 40),
        "timestep": torch.rand(BATCH),
        "img_ids": torch.randint(0, 9, (length, 3)).float(),
        "txt_ids": torch.zeros(TEXT, 3),
    }


def wan(_: int) -> dict[str, Any]:
    """A video of 3 x 4 x 6 patches."""
    prompt = torch.randn(BATCH, TEXT, 48)
    return noise(4, 3, 8, 12) | {"encoder_hidden_states": prompt}


def _case(
    name: str,
    class_name: str,
    sizes: dict[str, Any],
    inputs: Callable[[int], dict[str, Any]],
    shard: dict[str, int] | None = None,
    lengths: tuple[int, ...] = (PATCHES,),
) -> Case:
    made = functools.partial(model, class_name, sizes)
    return Case(name, "diffusers", made, inputs, shard or {}, lengths)


CASES = [
    _case("dit/classes", "DiTTransformer2DModel", DIT, dit),
    _case("sd3/joint", "SD3Transformer2DModel", SD3, sd3),
    _case(
        "flux/joint",
        "FluxTransformer2DModel",
        FLUX,
        flux,
        {"hidden_states": 1, "encoder_hidden_states": 1},
        (37, 64),
    ),
    _case("wan/video", "WanTransformer3DModel", WAN, wan),
]
