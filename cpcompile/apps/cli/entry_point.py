"""Make the model and the inputs that "module:function" stands for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch import Tensor

from cpcompile.errors import InputError


def made(text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model, and the arguments of one call, that "module:function" makes.

    Raises: InputError, saying what there is instead.
    """
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise InputError(f"got {text!r}; needed module:function, such as train:make")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module is there, and what it imports is not
        raise InputError(
            f"there is no module {error.name!r}, in {Path.cwd()} or installed; needed "
            "the name of a module that Python can import, without .py"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        there = [n for n, x in vars(module).items() if callable(x) and n[0] != "_"]
        raise InputError(
            f"module {module_name} ({module.__file__}) has no function {name!r}; it "
            f"has {', '.join(sorted(there)) or 'none'}"
        )
    return _arguments(text, function())


def _arguments(
    text: str, result: Any
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    if isinstance(result, tuple):
        kind = f"({', '.join(type(part).__name__ for part in result)})"
        if len(result) == 2 and isinstance(result[0], nn.Module):
            model, inputs = result
            if isinstance(inputs, Tensor):
                return model, (inputs,), {}
            if isinstance(inputs, Mapping):
                return model, (), dict(inputs)
            if isinstance(inputs, tuple | list):
                return model, tuple(inputs), {}
    else:
        kind = type(result).__name__
    raise InputError(
        f"{text} returned {kind}; needed (model, inputs), where inputs are a tensor, a "
        "tuple of arguments, or a dict of keyword arguments"
    )
