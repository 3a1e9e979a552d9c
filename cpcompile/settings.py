"""Read `cpcompile.config`, and say which values are wrong.

torch's config modules check names, not values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cpcompile import config
from cpcompile.errors import OptionError


def setting(name: str) -> Any:
    """Return the value of `cpcompile.config.<name>`.

    Raises: OptionError if it is of a wrong type or out of range.
    """
    accepts, needed = _RULES[name]
    value = getattr(config, name)
    if not accepts(value):
        raise OptionError(f"cpcompile.config.{name} is {value!r}; needed {needed}")
    return value


def setting_names() -> list[str]:
    return list(_RULES)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    quoted = ", ".join(map(repr, choices))
    return lambda v: isinstance(v, str) and v in choices, f"one of {quoted}"


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "agreement_timeout_seconds": (
        lambda v: _is_number(v) and v > 0,
        "a positive number of seconds",
    ),
    "tie_fraction": (
        lambda v: _is_number(v) and v >= 0,
        "a number that is not negative, such as 0.05",
    ),
    "hardware": (
        lambda v: isinstance(v, str) and bool(v),
        'the name of a profile, the path of a .json file, or "auto"',
    ),
    "eager_strategy": _one_of("ring", "all_gather"),
    "step_kernel": _one_of("auto", "triton", "aten_flash", "aten_math"),
    "check_overlap": (lambda v: isinstance(v, bool), "True or False"),
    "tile_megabytes": (
        lambda v: v is None or (_is_number(v) and v > 0),
        "a positive number of megabytes, or None",
    ),
    "tile_least_megabytes": (
        lambda v: _is_number(v) and v > 0,
        "a positive number of megabytes",
    ),
    "whole_mask_share": (
        lambda v: _is_number(v) and v >= 0,
        "a number that is not negative, such as 1.0",
    ),
    "gradient_bucket_megabytes": (
        lambda v: v is None or (_is_number(v) and v >= 0),
        "a number of megabytes, 0 for none, or None",
    ),
}
