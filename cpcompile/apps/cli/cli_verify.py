"""`cpcompile verify my_module:make_model_and_inputs`, and `cpcompile trace`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn
from torch import Tensor

from cpcompile.apps.verification.trace import trace
from cpcompile.apps.verification.verification_report import Report
from cpcompile.apps.verification.verify import verify
from cpcompile.errors import InputError


def run(parsed: argparse.Namespace) -> int:
    """Verify, print the report, write it as JSON; return the exit code."""
    model, args, kwargs = made(parsed.function)
    report: Report = verify(
        model,
        *args,
        options=_options(parsed),
        world=parsed.world,
        steps=parsed.steps,
        show_progress=True,
        **kwargs,
    )
    print(report)
    if parsed.json:
        Path(parsed.json).write_text(report.to_json() + "\n")
    return report.exit_code


def run_trace(parsed: argparse.Namespace) -> int:
    """Record a step, write it, print the calls with their times; return 0."""
    model, args, kwargs = made(parsed.function)
    recorded = trace(
        model, args, kwargs, _options(parsed), parsed.world, show_progress=True
    )
    Path(parsed.out).write_text(recorded.to_json() + "\n")
    print(recorded.explanation)
    if recorded.note:
        print(recorded.note)
    print(f"wrote {parsed.out}; open it at ui.perfetto.dev", file=sys.stderr)
    if parsed.html:
        Path(parsed.html).write_text(recorded.explanation.to_html(), encoding="utf-8")
        print(f"wrote {parsed.html}", file=sys.stderr)
    return 0


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(parsed, name) for name in ("inner", "strategy", "layout")}
    return {name: value for name, value in options.items() if value is not None}


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
    needed = (
        f"{text} returned {_kind(result)}; needed (model, inputs), where inputs are a "
        "tensor, a tuple of arguments, or a dict of keyword arguments"
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(needed)
    model, inputs = result
    if not isinstance(model, nn.Module):
        raise InputError(needed)
    if isinstance(inputs, Tensor):
        return model, (inputs,), {}
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    if isinstance(inputs, tuple | list):
        return model, tuple(inputs), {}
    raise InputError(needed)


def _kind(x: Any) -> str:
    if isinstance(x, tuple):
        return f"({', '.join(type(part).__name__ for part in x)})"
    return type(x).__name__
