"""Describe what a program depends on in addition to its graph, as texts.

These are modes, settings and versions. The ranks compare them (agreement): a rank that
compiles under autocast sends messages of other sizes, one without gradients computes no
backward, and one with another setting may choose another strategy.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cpcompile.settings import setting, setting_names
from cpcompile.torch_private.dynamo import functorch_config

# Settings that may differ between ranks: how patient they are, and the profile of the
# machine, where the first rank's counts for all.
_OF_ONE_RANK = ("agreement_timeout_seconds", "hardware")

# Settings that watch a program and do not change it. The ranks watch it together.
_WATCHING = ("check_ranks", "profile")

# Settings of torch's compilers that say what is printed, checked, measured or kept, or
# where; Inductor's own list of what does not matter lacks them.
_NOT_COMPARED = (
    *("annotate", "aot_inductor", "autotune_num_choices_displayed", "benchmark"),
    *("bundle", "debug", "disable_progress", "generate_intermediate_hooks"),
    *("profile", "test_configs", "trace", "verbose", "visualize"),
)
_NOT_COMPARED_ENDS = ("_asserts", "_dir", "_path", "_cache")

_mkldnn: Any = torch.backends.mkldnn  # a module that is replaced when it is imported

_NUMBERS: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "matmul precision": torch.get_float32_matmul_precision,
    "matmul precision of cuda": lambda: torch.backends.cuda.matmul.fp32_precision,
    "matmul precision of the cpu": lambda: _mkldnn.matmul.fp32_precision,
    "tf32 in cuda": lambda: torch.backends.cuda.matmul.allow_tf32,
    "tf32 in cudnn": lambda: torch.backends.cudnn.allow_tf32,
    "sums in float16": lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    "reduced precision of sums": lambda: (
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    ),
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "kernels of scaled_dot_product_attention": lambda: _sdpa_kernels(),
}


def surroundings(
    device_type: str, variables: Mapping[str, Any], inductor: bool
) -> dict[str, str]:
    """Return what a program depends on in addition to its graph, item by item.

    Args:
        device_type: of the mesh.
        variables: local variables of the function that is compiled; modules among them
            have a training mode.
        inductor: whether Inductor compiles the graph, so that its settings count.
    """
    # Dynamo compiles outside of inference mode, whose programs are those of no_grad.
    items = {"grad mode": "on" if torch.is_grad_enabled() else "off"}
    for kind in dict.fromkeys((device_type, "cpu")):
        items[f"autocast of {kind}"] = (
            str(torch.get_autocast_dtype(kind))
            if torch.is_autocast_enabled(kind)
            else "off"
        )
    for name, value in variables.items():
        if isinstance(value, nn.Module):
            items[f"training mode of {name}"] = _training(value)
    for name in setting_names():
        if name not in (*_OF_ONE_RANK, *_WATCHING):
            items |= _setting(name)
    for name, read in _NUMBERS.items():
        items[name] = _read(read)
    items |= _compiler_settings("functorch", functorch_config)
    if inductor:
        # Inductor is slow to import, and this graph imports it anyway.
        from cpcompile.torch_private.inductor import inductor_config

        items |= _compiler_settings("inductor", inductor_config)
    return items | _versions()


def how_watched() -> dict[str, str]:
    """Return the settings that watch a program, item by item."""
    return {key: text for name in _WATCHING for key, text in _setting(name).items()}


def _setting(name: str) -> dict[str, str]:
    value = setting(name)
    return {f"cpcompile.config.{name}": repr("auto" if value is None else value)}


def _read(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except (AttributeError, RuntimeError) as error:  # a mix of torch's two interfaces
        return type(error).__name__


def _sdpa_kernels() -> list[str]:
    """List kernels that the user has not forbidden; torch.nn.attention.sdpa_kernel."""
    cuda = torch.backends.cuda
    allowed = {
        "flash": cuda.flash_sdp_enabled(),
        "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return [name for name, is_allowed in allowed.items() if is_allowed]


def _training(module: nn.Module) -> str:
    """Return "train", "eval", or which modules are in the rarer of the two modes."""
    train: list[str] = []
    evaluate: list[str] = []
    for name, part in module.named_modules():
        (train if part.training else evaluate).append(name or "itself")
    if not train or not evaluate:
        return "train" if train else "eval"
    fewer, mode = (train, "train") if len(train) < len(evaluate) else (evaluate, "eval")
    digest = hashlib.sha256("\n".join(fewer).encode()).hexdigest()[:8]
    more = f" and {len(fewer) - 3} more ({digest})" if len(fewer) > 3 else ""
    return f"mixed, {mode} of {', '.join(fewer[:3])}{more}"


def _compiler_settings(owner: str, settings: Any) -> dict[str, str]:
    """Return the settings in the key of torch's caches that _NOT_COMPARED leaves."""
    return {
        f"{owner} setting {name}": _plain(value)
        for name, value in settings.save_config_portable().items()
        if not name.startswith(_NOT_COMPARED) and not name.endswith(_NOT_COMPARED_ENDS)
    }


def _plain(value: Any) -> str:
    """Return a text without addresses of objects, which differ between processes."""
    if isinstance(value, dict):
        parts = (f"{_plain(k)}: {_plain(v)}" for k, v in value.items())
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_plain, value)) + "]"
    if value is None or isinstance(value, str | bool | int | float):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


@functools.cache
def _versions() -> dict[str, str]:
    versions = {"version of torch": str(torch.__version__)}
    for package in ("cpcompile", "triton"):
        try:
            versions[f"version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[f"version of {package}"] = "none"
    return versions
