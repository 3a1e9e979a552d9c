"""Every transformer of diffusers, small; its inputs are made by their names.

What the names leave open is tried, on one process: whether latents are tokens, images,
videos or sounds, and how padding of a prompt is said.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers.models.transformers
import torch
import torch.nn as nn
from diffusers import ConfigMixin, ModelMixin
from torch import Tensor

from tests.models.case import BATCH, VOCABULARY
from tests.models.families.automatic_sizes import (
    CHANNELS,
    FRAMES,
    SIDE,
    TEXT,
    WIDTH,
    NoConfigurationError,
    accepted,
    parameters,
    sizes_of,
)

TOKENS = 36
_GRID = (1, 6, 6)  # frames, rows, columns of latents that are tokens already
SHAPES = {
    "tokens": (TOKENS, CHANNELS),
    "images": (CHANNELS, SIDE, SIDE),
    "videos": (CHANNELS, FRAMES, SIDE, SIDE),
    "frames": (FRAMES, CHANNELS, SIDE, SIDE),
    "channels last": (FRAMES, SIDE, SIDE, CHANNELS),
    "sounds": (CHANNELS, TOKENS),
    "vectors": (WIDTH,),
}
MASKS = (torch.bool, torch.long, None)  # of the prompt; None: without padding


@dataclass(frozen=True)
class Recipe:
    """What names do not say.

    shape: one of SHAPES. mask: one of MASKS. unset: see sizes_of.
    """

    shape: str
    mask: torch.dtype | None
    unset: bool = False


def families() -> list[str]:
    """Names of all model classes of the folder of transformers."""
    return sorted(
        name
        for name, found in vars(diffusers.models.transformers).items()
        if inspect.isclass(found)
        and issubclass(found, ModelMixin)
        and issubclass(found, ConfigMixin)
    )


def model(family: str, unset: bool) -> nn.Module:
    """The model, in training mode."""
    made: Any = _class(family)
    torch.manual_seed(0)
    found: nn.Module = accepted(made, sizes_of(made.__init__, unset))
    return found.train()


def has_plan(family: str) -> bool:
    """Whether the class says how its own library divides its sequences."""
    return bool(_class(family)._cp_plan)


def parts(family: str) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    """What makes the model, and what makes its inputs.

    Raises: NoConfigurationError.
    """
    problem = ""
    for unset in (False, True):
        make = functools.partial(model, family, unset)
        try:
            parameters(make)
            module = make()
        except Exception as error:  # whatever a class makes of such sizes
            problem = f"{type(error).__name__}: {error}"
            continue
        problem = ""
        for recipe in _recipes(family, unset):
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


def _recipes(family: str, unset: bool) -> Iterator[Recipe]:
    """Yield all ways to call a class, first what its name and arguments tell."""
    taken = inspect.signature(_class(family).forward).parameters
    are_tokens = {"img_ids", "img_shapes", "num_frames", "position_ids"} & set(taken)
    kinds = {"3D": "videos", "2D": "images", "1D": "sounds"}
    likely = [x for sign, x in kinds.items() if sign in family]
    shapes = dict.fromkeys([*(["tokens"] if are_tokens else []), *likely, *SHAPES])
    for shape, mask in itertools.product(shapes, MASKS):
        yield Recipe(shape, mask, unset)


def inputs_of(family: str, recipe: Recipe, _: int = 0) -> dict[str, Any]:
    """Keyword arguments of the forward.

    Raises: NoConfigurationError, if one is needed whose name says nothing.
    """
    found = {}
    for name, parameter in inspect.signature(_class(family).forward).parameters.items():
        said = str(parameter.annotation)
        is_optional = parameter.default is not inspect.Parameter.empty
        if name in ("self", "return_dict") or (is_optional and not _is_given(name)):
            continue
        value = _value(family, recipe, name)
        if value is None:
            if not is_optional:
                raise NoConfigurationError(f"no value for the input {name}: {said}")
            continue
        is_list = said.removeprefix("typing.").lower().startswith("list[torch.tensor")
        found[name] = list(value.unbind(0)) if is_list else value
    return found


_LATENTS = (
    *("hidden_states", "x", "audio_hidden_states", "context_latents", "inputs_embeds"),
    *("control_hidden_states", "decoder_input_tokens"),
)
_PROMPTS = ("cap_feats", "text_bth")
_POOLED = ("pooled_projections", "pooled_embeds", "proj_embedding")
_TIMES = ("t", "sigma", "guidance", "decoder_noise_time")
_POSITIONS = ("img_ids", "txt_ids", "position_ids")
_CLASSES = ("class_labels", "style")
_SIZES = dict.fromkeys(("original_size", "target_size", "crop_coords"), 2)
_SIZES |= {"image_meta_size": 6}
_NEEDED_FOR = {"guidance": "guidance_embeds", "image_embeds": "image_embed_dim"}
_OTHERS = (
    *("img_shapes", "num_frames", "audio_num_frames", "height", "width", "text_lens"),
    *("guidance", "timesteps", "timestep", "class_labels", "style", "image_meta_size"),
    *("padding_mask", "image_embeds", "global_hidden_states"),
)


def _is_given(name: str) -> bool:
    """Whether an argument with a default is given all the same."""
    if "mask" in name and name not in _OTHERS:
        return _is_of_prompt(name)
    if name.endswith(("_image", "_cond", "_kwargs")) or "timestep_" in name:
        return False
    known = (*_LATENTS, *_POOLED, *_POSITIONS, *_OTHERS)
    return name in known or _is_prompt(name)


def _is_prompt(name: str) -> bool:
    states = name.startswith(("encoder_hidden_states", "audio_encoder_hidden_states"))
    return name in _PROMPTS or (states and "mask" not in name)


def _is_of_prompt(name: str) -> bool:
    return "mask" in name and name.startswith(("encoder", "text", "audio_encoder"))


def _value(family: str, recipe: Recipe, name: str) -> Any:
    """The value of an argument, or None if its name says nothing."""
    if name in _NEEDED_FOR and not _default(family, _NEEDED_FOR[name]):
        return None
    if (shape := _shape(recipe, name)) is not None:
        return torch.randn(BATCH, *shape)
    if _is_of_prompt(name):
        return None if recipe.mask is None else _padding().to(recipe.mask)
    if name in _TIMES or "timestep" in name:
        return torch.rand(BATCH)
    if name in _POSITIONS:
        return _positions(family, name)
    if name in _CLASSES:
        return torch.randint(0, 2, (BATCH,))
    if name in _SIZES:
        return torch.full((BATCH, _SIZES[name]), float(SIDE))
    if name == "input_ids":
        return torch.randint(5, VOCABULARY, (BATCH, TEXT))
    return _numbers().get(name)


def _shape(recipe: Recipe, name: str) -> tuple[int, ...] | None:
    """The shape of what is random, behind the batch; None for other arguments."""
    if name in _LATENTS:
        return SHAPES["tokens" if name == "audio_hidden_states" else recipe.shape]
    if name == "image_embeds" or _is_prompt(name):
        return (TEXT, WIDTH)
    if name in _POOLED:
        return (WIDTH,)
    return (1, WIDTH) if name == "global_hidden_states" else None


def _numbers() -> dict[str, Any]:
    """What has the same values for every class."""
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


def _positions(family: str, name: str) -> Tensor:
    """Positions of image, prompt, or both, on as many axes as a head has parts."""
    taken = inspect.signature(_class(family)).parameters.values()
    axes = [x.default for x in taken if "axes_dim" in x.name]
    count = len(axes[0]) if axes and axes[0] else 3
    grid = torch.cartesian_prod(*(torch.arange(x) for x in _GRID))
    image = torch.cat([grid, grid.new_zeros(TOKENS, count)], 1)[:, :count].float()
    prompt = torch.zeros(TEXT, count)
    return {
        "img_ids": image,
        "txt_ids": prompt,
        "position_ids": torch.cat([prompt, image]),
    }[name]
