"""Sizes of the smallest configurations, by the names of what constructors take."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

VOCABULARY, WIDTH, HEADS, INNER, HEAD_DIM = 211, 64, 4, 96, 16
CHANNELS, SIDE, FRAMES, TEXT = 4, 12, 3, 11  # of latents; tokens of a prompt
LARGEST = 52_000_000  # parameters; more are no small configuration
_ATTEMPTS = 6
UNSET = 2  # how much of what is None by default gets a size; see sizes_of

_BY_NAME = {  # the first that fits says the size
    r"(head_dim|dim_head)$": HEAD_DIM,
    r"heads$": HEADS,
    r"^(num|n)_.*(layers|blocks)$|^(n?layers|.*depths?)$": 2,
    r"(vocab_size|codebook_size)$": VOCABULARY,
    r"^pad_token_id$": 0,
    r"^inject_.*_blocks$": 1,
    r"^motion_encoder_size$": HEAD_DIM,
    r"^rope_freq_dim$": 2,
    r"^(num_embeddings|text_len.*|max_text_seq_length)$": TEXT,
    r"^max_position_embeddings$": 4 * HEAD_DIM,
    r"^num_classes$": 10,
    r"^img_size$": 64,
    r"^sample_(size|width|height)$": SIDE,
    r"^pos_embed_max_size$": SIDE * SIDE,  # of a side, or of all positions
    r"num_groups$": 2,
    r"^(video_length|sample_frames)$": FRAMES,
    r"^(vace_|audio_|cond_)?(in|out|io|latent)_channels$": CHANNELS,
    r"^(in|out)_((visual|audio)_)?dim$|^latent_dim$": CHANNELS,
    r"^freq_dim$": 2 * HEAD_DIM,
    r"^rotary_dim$": HEAD_DIM,
    r"(ff|ffn|inner|d_ff|intermediate)_?(dim|size|hidden_size)?$": INNER,
    r"(^|_)(dims?|hidden_size|channels|chs|width|size_hidden|d_model)$": WIDTH,
    r"_dim_t5$|_dim2$": WIDTH,
}
_BY_NAME_IF_UNSET = _BY_NAME | {r"^patch_size$": 2}
_PARTS_OF_A_HEAD = re.compile(r"axes_dim|rope_dim|axes_dims|mrope_section")
_OF_PATCHES = re.compile(r"patch|axes_lens|scale|rope_axes_len|window|tile")
_LAYER_NUMBERS = re.compile(r"layer_ids$|_layers$")


class NoConfigurationError(Exception):
    """A family that these sizes do not fit, or whose classes do not say theirs."""


def sizes_of(made: Callable[..., Any], unset: int) -> dict[str, Any]:
    """Arguments of a constructor that make what it makes small, by their names.

    unset: 1 gives sizes to what is None by default, too, but for those of outputs,
        which are then mostly those of inputs; 2 to all, and to a head one part more.
    """
    sizes: dict[str, Any] = {}
    for name, parameter in inspect.signature(made).parameters.items():
        default, size = parameter.default, None
        if name == "rope_scaling" and unset:
            ones = [1.0] * (HEAD_DIM // 2)
            size = {"short_factor": ones, "long_factor": ones}
        elif default is None and unset and "list" in str(parameter.annotation):
            size = _list(name)
        elif default is None and unset and "int" in str(parameter.annotation):
            by_name = _BY_NAME_IF_UNSET
            if name.startswith("out_") and unset < UNSET:
                by_name = {}
            size = _number(name, by_name)
        elif default is False and name.startswith("has_"):
            size = True
        elif isinstance(default, float) and "drop" in name:
            size = 0.0
        elif isinstance(default, list | tuple):
            size = _numbers(name, default, more=unset == UNSET)
        elif isinstance(default, int) and not isinstance(default, bool):
            size = _number(name)
        if size is not None:
            sizes[name] = size
    return sizes


def _number(name: str, by_name: dict[str, int] = _BY_NAME) -> int | None:
    """The size that goes with a name, or None."""
    for pattern, size in by_name.items():
        if re.search(pattern, name):
            return size
    return None


def _list(name: str) -> list[int] | None:
    """Return sizes in a list that has no default, or None."""
    if _PARTS_OF_A_HEAD.search(name):
        return head_parts(2)
    if _LAYER_NUMBERS.search(name):
        return [0, 1, 0, 1]
    size = _number(name)
    return None if size is None else [size] * 2


def _numbers(name: str, default: Iterable[Any], more: bool) -> Any:
    """As many sizes as the default has, or None to keep that.

    more: a head has a part more, for frames, than its default.
    """
    values = list(default)
    if not values or not all(type(x) is int for x in values):
        return None
    if _PARTS_OF_A_HEAD.search(name):
        parts = head_parts(len(values) + more)
        if "section" in name:  # of pairs
            parts = [x // 2 for x in parts]
    elif _LAYER_NUMBERS.search(name):
        parts = [0]
    elif _OF_PATCHES.search(name) or (size := _number(name)) is None:
        return None
    else:
        parts = [size] * len(values)
    return type(default)(parts)  # type: ignore[call-arg]  # a list or a tuple


def head_parts(count: int) -> list[int]:
    """Even sizes of the parts of a head, one for each axis of positions."""
    each = HEAD_DIM // count // 2 * 2
    return [HEAD_DIM - each * (count - 1)] + [each] * (count - 1)


def accepted(make: Callable[..., Any], sizes: dict[str, Any]) -> Any:
    """What is made of the sizes; one that is refused by its name is left out."""
    refused: list[str] = []
    for _ in range(_ATTEMPTS):
        given = {name: x for name, x in sizes.items() if name not in refused}
        try:
            return make(**given)
        except Exception as error:  # whatever a class makes of what it does not like
            named = [x for x in given if x in str(error)]
            if not named:
                raise
            refused.append(named[0])
    raise NoConfigurationError(f"none of {refused} is accepted")


def parameters(make: Callable[[], nn.Module]) -> int:
    """How many parameters a model has; nothing is allocated."""
    with torch.device("meta"):
        count = sum(x.numel() for x in make().parameters())
    if count > LARGEST:
        raise NoConfigurationError(f"{count} parameters with the sizes of names")
    return count
