"""A small model of every module of timm that has attention, for images."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import timm
import torch
import torch.nn as nn

from tests.models.case import BATCH
from tests.models.families.automatic_sizes import (
    NoConfigurationError,
    accepted,
    parameters,
    sizes_of,
)

_ATTENTION = re.compile(r"Attention|(?<!Split)Attn|Transformer|Vi[tT]")  # a class
_SOFTMAX = ("scaled_dot_product_attention", "softmax(")
_TRIED = 6  # registered names of a module, the shortest first
_SIDES = (64, 112, 192)  # of an image, which patches of 16, 14 or 48 divide
_PATCH = 8  # so that there are more than a few tokens
_PLAIN = {"img_size": _SIDES[0], "embed_dim": 64, "depth": 2, "num_heads": 4}


def families() -> list[str]:
    """Names of the modules that compute softmax, or have a class with attention."""
    return [name for name in timm.list_modules() if _has_attention(name)]


def _has_attention(name: str) -> bool:
    module = sys.modules[f"timm.models.{name}"]
    classes = [k for k, x in vars(module).items() if inspect.isclass(x)]
    source = inspect.getsource(module)
    by_name = any(_ATTENTION.search(x) for x in classes)
    return by_name or any(x in source for x in _SOFTMAX)


def model(name: str, sizes: tuple[tuple[str, Any], ...]) -> nn.Module:
    """The model of a registered name, in training mode."""
    torch.manual_seed(0)
    found: nn.Module = accepted(functools.partial(timm.create_model, name), dict(sizes))
    return found.train()


def parts(family: str) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    """What makes the smallest model of a module, and what makes its inputs."""
    problems: list[str] = []
    for own_side in (False, True):
        counts = {}
        for make in _makers(family, own_side):
            try:
                counts[make] = parameters(make)
            except Exception as error:  # whatever a class makes of such sizes
                problems.append(f"{type(error).__name__}: {error}")
        for make in sorted(counts, key=counts.__getitem__):
            for side in (*_SIDES, _own_side(make.args[0])):
                inputs = functools.partial(images, side)
                try:
                    with torch.no_grad():
                        make()(**inputs(0))
                except Exception as error:  # so these are no inputs of it
                    problems.append(f"{type(error).__name__}: {error}")
                else:
                    return make, inputs
    raise NoConfigurationError(problems[0])


def images(side: int, _: int = 0) -> dict[str, Any]:
    """A batch of random images."""
    return {"x": torch.randn(BATCH, 3, side, side)}


def _makers(family: str, own_side: bool) -> Iterator[functools.partial[nn.Module]]:
    """Yield what makes models, with sizes by their names and without.

    own_side: of images of the size that the models have themselves.
    """
    names = sorted(timm.list_models(module=family), key=lambda x: (len(x), x))
    for name in names[:_TRIED]:
        with torch.device("meta"):
            made = type(timm.create_model(name))
        sizes = sizes_of(made.__init__, unset=False)
        patch = inspect.signature(made.__init__).parameters.get("patch_size")
        if patch is not None and isinstance(patch.default, int):
            sizes["patch_size"] = _PATCH
        few = {k: x for k, x in sizes.items() if "drop" in k or k == "img_size"}
        own = {k: x for k, x in sizes.items() if k != "img_size"}
        for given in [own] if own_side else [sizes, _PLAIN | few, few]:
            yield functools.partial(model, name, tuple(given.items()))


def _own_side(name: str) -> int:
    size: tuple[int, ...] = timm.get_pretrained_cfg(name).input_size
    return size[-1]
