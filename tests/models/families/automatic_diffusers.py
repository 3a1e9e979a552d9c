"""Every transformer of diffusers, small; its inputs are made by their names.

What the names leave open is tried, on one process: whether latents are tokens, images,
videos or sounds, and how many channels they have beside those of a condition; whether
a prompt has the states of one layer or of several, and how its padding is said; and
whether frames have times of their own.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers.models.transformers
import torch
import torch.nn as nn
from diffusers import ConfigMixin, ModelMixin
from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina
from torch import Tensor

from tests.models.case import BATCH, VOCABULARY
from tests.models.families.automatic_sizes import (
    CHANNELS,
    FRAMES,
    HEAD_DIM,
    SIDE,
    TEXT,
    UNSET,
    WIDTH,
    NoConfigurationError,
    accepted,
    parameters,
    sizes_of,
)

TOKENS = 36
LAYERS = 2  # of a text encoder, whose states a prompt may have
_GRID = (1, 6, 6)  # frames, rows, columns of latents that are tokens already
SHAPES: dict[str, tuple[int | None, ...]] = {  # behind the batch; None: the channels
    "tokens": (TOKENS, None),
    "images": (None, SIDE, SIDE),
    "videos": (None, FRAMES, SIDE, SIDE),
    "frames": (FRAMES, None, SIDE, SIDE),
    "channels last": (FRAMES, SIDE, SIDE, None),
    "sounds": (None, TOKENS),
    "vectors": (WIDTH,),
    "states": (TOKENS, WIDTH),
    "patches": (TOKENS, None, 1, 2, 2),
}
MASKS = (torch.bool, torch.long, None)  # of the prompt; None: without padding
PROMPTS = (
    *((TEXT, WIDTH), (TOKENS, WIDTH)),  # the latter: beside the latents
    *((LAYERS, TEXT, WIDTH), (TEXT, LAYERS, WIDTH)),
    None,
)
TIMES = ((), (FRAMES,), (1, FRAMES))
WHOLE = ((1, WIDTH), (WIDTH,))  # what is said of a sound as a whole
POSITIONS = ("joined", "in rows", "with sounds", "numbers")


@dataclass(frozen=True)
class Recipe:
    """What names do not say.

    shape: one of SHAPES. channels: of the latents. mask, prompt, times, whole,
    positions: one of those that are called so. unset: see sizes_of.
    """

    shape: str
    mask: torch.dtype | None = None
    prompt: tuple[int, ...] | None = PROMPTS[0]
    times: tuple[int, ...] = TIMES[0]
    whole: tuple[int, ...] = WHOLE[0]
    positions: str = POSITIONS[0]
    channels: int = CHANNELS
    unset: int = 0


def families() -> list[str]:
    """Names of all model classes of the folder of transformers."""
    return sorted(
        name
        for name, found in vars(diffusers.models.transformers).items()
        if inspect.isclass(found)
        and issubclass(found, ModelMixin)
        and issubclass(found, ConfigMixin)
    )


def model(family: str, unset: int) -> nn.Module:
    """The model, in training mode."""
    made: Any = _class(family)
    torch.manual_seed(0)
    found: nn.Module = accepted(made, sizes_of(made.__init__, unset))
    return found.train()


def has_plan(family: str) -> bool:
    """Whether the class says how its own library divides its sequences."""
    return bool(_class(family)._cp_plan)


def parts(family: str) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    """What makes the model, and what makes its inputs."""
    problem = ""
    for unset in range(UNSET + 1):
        make = functools.partial(model, family, unset)
        try:
            parameters(make)
            module = make()
        except Exception as error:  # whatever a class makes of such sizes
            problem = f"{type(error).__name__}: {error}"
            continue
        problem = ""
        for recipe in _recipes(family, unset, module):
            inputs = functools.partial(inputs_of, family, recipe)
            try:
                with torch.no_grad():
                    module(**inputs(0))
            except Exception as error:  # so these are no inputs of it
                problem = problem or f"{type(error).__name__}: {error}"
            else:
                return make, inputs
    raise NoConfigurationError(problem)


def _class(family: str) -> Any:
    return getattr(diffusers.models.transformers, family)


def _recipes(family: str, unset: int, module: Any) -> Iterator[Recipe]:
    """Yield all ways to call a class, first what its name and arguments tell."""
    taken = set(inspect.signature(_class(family).forward).parameters)
    are_tokens = {"img_ids", "img_shapes", "num_frames", "position_ids"} & taken
    kinds = {"3D": "videos", "2D": "images", "1D": "sounds"}
    likely = [x for sign, x in kinds.items() if sign in family]
    shapes = dict.fromkeys([*(["tokens"] if are_tokens else []), *likely, *SHAPES])
    made = getattr(module.config, "in_channels", None)
    channels = dict.fromkeys(
        [
            CHANNELS,
            *([made] if isinstance(made, int) else []),
            CHANNELS // 2,  # beside those of a condition
            2 * CHANNELS + 1,  # with a condition and its mask
            4 * CHANNELS,  # of the four corners of a patch
        ]
    )
    choices: dict[str, tuple[Callable[[str], bool], Iterable[Any]]] = {
        "channels": (_is_latent, channels),
        "positions": ("position_ids".__eq__, POSITIONS),
        "whole": ("global_hidden_states".__eq__, WHOLE),
        "times": (_is_time, TIMES),
        "prompt": (_is_prompt, PROMPTS),
        "shape": (_is_latent, shapes),
        "mask": (_is_of_prompt, MASKS),
    }
    possible = [
        list(values) if any(map(asks, taken)) else list(values)[:1]
        for asks, values in choices.values()
    ]
    for chosen in itertools.product(*possible):
        yield Recipe(**dict(zip(choices, chosen, strict=True)), unset=unset)


def inputs_of(family: str, recipe: Recipe, _: int = 0) -> dict[str, Any]:
    """Keyword arguments of the forward."""
    found = {}
    for name, parameter in inspect.signature(_class(family).forward).parameters.items():
        said = str(parameter.annotation)
        is_optional = parameter.default is not inspect.Parameter.empty
        if name in ("self", "return_dict") or (is_optional and not _is_given(name)):
            continue
        value = _value(family, recipe, name, is_optional)
        if value is None:
            if not is_optional:
                raise NoConfigurationError(f"no value for the input {name}: {said}")
            continue
        is_list = said.removeprefix("typing.").lower().startswith("list[torch.tensor")
        divided = is_list and isinstance(value, Tensor)
        found[name] = list(value.unbind(0)) if divided else value
    return found


_LATENTS = (
    *("hidden_states", "x", "audio_hidden_states", "context_latents", "inputs_embeds"),
    *("control_hidden_states", "decoder_input_tokens", "latents_clean"),
    *("latents_history_2x", "latents_history_4x"),
)
_PROMPTS = ("cap_feats", "text_bth")
_POOLED = ("pooled_projections", "pooled_embeds", "proj_embedding")
_TIMES = ("t", "sigma", "guidance", "decoder_noise_time")
_POSITIONS = ("img_ids", "txt_ids", "position_ids")
_SIZES = dict.fromkeys(("original_size", "target_size", "crop_coords"), 2)
_SIZES |= {"image_meta_size": 6}
_FRAMES = (
    *("indices_latents", "indices_latents_clean"),
    *("indices_latents_history_2x", "indices_latents_history_4x"),
)
_NEEDED_FOR = {"guidance": "guidance_embeds", "image_embeds": "image_embed_dim"}
_OTHERS = (
    *("img_shapes", "num_frames", "audio_num_frames", "height", "width", "text_lens"),
    *("guidance", "timesteps", "timestep", "class_labels", "style", "image_meta_size"),
    *("padding_mask", "image_embeds", "global_hidden_states", "shape_list"),
    *("text_encoder_layers", "pose_hidden_states", "face_pixel_values"),
    "cross_attention_kwargs",
)


def _is_given(name: str) -> bool:
    """Whether an argument with a default is given all the same."""
    if "mask" in name and name not in _OTHERS:
        return _is_of_prompt(name)
    if name in _OTHERS:
        return True
    if name.endswith(("_image", "_cond", "_kwargs")) or "timestep_" in name:
        return False
    if name == "context_latents":  # which are images, where they are optional
        return False
    known = (*_LATENTS, *_POOLED, *_POSITIONS, *_FRAMES, *_OTHERS)
    return name in known or _is_prompt(name)


def _is_latent(name: str) -> bool:
    return name in _LATENTS


def _is_time(name: str) -> bool:
    return name in _TIMES or ("timestep" in name and name != "timestep_indices")


def _is_prompt(name: str) -> bool:
    states = name.startswith(("encoder_hidden_states", "audio_encoder_hidden_states"))
    return name in _PROMPTS or (states and "mask" not in name)


def _is_of_prompt(name: str) -> bool:
    return "mask" in name and name.startswith(("encoder", "text", "audio_encoder"))


def _value(family: str, recipe: Recipe, name: str, is_optional: bool) -> Any:
    """The value of an argument, or None if its name says nothing."""
    if name in _NEEDED_FOR and is_optional and not _default(family, _NEEDED_FOR[name]):
        return None
    if (shape := _shape(recipe, name)) is not None:
        return torch.randn(BATCH, *shape)
    if _is_of_prompt(name):
        return None if recipe.mask is None else _padding().to(recipe.mask)
    if _is_time(name):
        return torch.rand(BATCH, *recipe.times)
    if name in _POSITIONS:
        return _positions(family, recipe, name)
    if name == "class_labels":
        return torch.randint(0, 2, (BATCH,))
    if name in _SIZES:
        return torch.full((BATCH, _SIZES[name]), float(SIDE))
    if name == "input_ids":
        return torch.randint(5, VOCABULARY, (BATCH, TEXT))
    if name == "num_frames" and recipe.shape == "images":  # one after another
        return BATCH
    if name in _FRAMES:
        return torch.arange(FRAMES)
    return _numbers().get(name)


def _shape(recipe: Recipe, name: str) -> tuple[int, ...] | None:
    """The shape of what is random, behind the batch; None for other arguments."""
    if name == "audio_hidden_states":
        return (TOKENS, CHANNELS)
    if name in _LATENTS:
        return tuple(recipe.channels if x is None else x for x in SHAPES[recipe.shape])
    if _is_prompt(name):
        return recipe.prompt
    return {
        "image_embeds": (TEXT, WIDTH),
        **dict.fromkeys(_POOLED, (WIDTH,)),
        "global_hidden_states": recipe.whole,
        "pose_hidden_states": (recipe.channels // 2 - 2, FRAMES - 1, SIDE, SIDE),
        "face_pixel_values": (3, 4 * (FRAMES - 1), HEAD_DIM, HEAD_DIM),
    }.get(name)


def _numbers() -> dict[str, Any]:
    """What has the same values for every class."""
    joined = TEXT + TOKENS
    angles = torch.rand(BATCH, TOKENS, WIDTH)
    kinds = torch.tensor([2] * TEXT + [0] * TOKENS + [1] * TOKENS)
    return {
        "num_frames": _GRID[0],
        "height": _GRID[1],
        "width": _GRID[2],
        "audio_num_frames": TOKENS,
        "img_shapes": [[_GRID]] * BATCH,
        "padding_mask": torch.zeros(1, 1, SIDE, SIDE),
        "text_lens": _padding().sum(1),
        "text_rope_pos": torch.arange(TEXT),
        "visual_rope_pos": [torch.arange(x) for x in (FRAMES, SIDE // 2, SIDE // 2)],
        "style": torch.zeros(BATCH, dtype=torch.long),
        "shape_list": [[_GRID]] * BATCH,
        "chunk_partition": [1, FRAMES - 1],
        "text_encoder_layers": [torch.randn(BATCH, TEXT, WIDTH) for _ in range(4)],
        "encodings_and_masks": [(torch.randn(BATCH, TEXT, WIDTH), _padding())],
        "prior_token_id": torch.randint(0, VOCABULARY, (BATCH, TOKENS)),
        "prior_token_drop": torch.zeros(BATCH, TOKENS, dtype=torch.bool),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(HEAD_DIM, SIDE, SIDE),
        "video_rotary_emb": (angles.cos(), angles.sin()),
        "img_mask": (torch.arange(TEXT + TOKENS // 4) >= TEXT).repeat(BATCH, 1),
        "segment_ids": (torch.arange(TOKENS) < TOKENS - 3).long().repeat(BATCH, 1),
        "indicator": (torch.arange(TOKENS) < TEXT).long().repeat(BATCH, 1) + 2,
        "cross_attention_kwargs": {},
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": torch.ones(BATCH, joined + 1, joined + 1).tril(),
        "token_tags": kinds,
        "timestep_indices": torch.zeros_like(kinds),
        "video_indices": (kinds == 0).nonzero()[:, 0],
        "audio_indices": (kinds == 1).nonzero()[:, 0],
        "text_indices": (kinds == 2).nonzero()[:, 0],
    }


def _default(family: str, argument: str) -> Any:
    """The default of an argument of the constructor, or None if there is none."""
    taken = inspect.signature(_class(family)).parameters
    return taken[argument].default if argument in taken else None


def _padding() -> Tensor:
    """1 for tokens of the prompt: the last row is shorter."""
    mask = torch.ones(BATCH, TEXT, dtype=torch.long)
    mask[-1, -3:] = 0
    return mask


def _positions(family: str, recipe: Recipe, name: str) -> Tensor:
    """Positions of image, prompt, or both, on as many axes as a head has parts."""
    if name == "position_ids" and recipe.positions == "numbers":
        return torch.arange(TEXT + 1 + TOKENS).repeat(BATCH, 1)
    taken = inspect.signature(_class(family)).parameters.values()
    axes = [x.default for x in taken if "axes_dim" in x.name]
    count = len(axes[0]) if axes and axes[0] else 3
    grid = torch.cartesian_prod(*(torch.arange(x) for x in _GRID))
    image = torch.cat([grid, grid.new_zeros(TOKENS, count)], 1)[:, :count].float()
    prompt = torch.zeros(TEXT, count)
    return {
        "joined": {
            "img_ids": image,
            "txt_ids": prompt,
            "position_ids": torch.cat([prompt, image]),
        }[name],
        "in rows": image.expand(BATCH, -1, -1),
        "with sounds": torch.cat([prompt, image, image]),
    }[recipe.positions]
