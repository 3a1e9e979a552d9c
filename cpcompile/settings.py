"""Say what options and settings may be, and read `cpcompile.config` by these rules.

torch's config modules check names, not values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cpcompile import config
from cpcompile.cost.plans import EAGER_STRATEGIES
from cpcompile.errors import OptionError


@dataclass(frozen=True)
class SettingRule:
    """What the value of an option or of a setting may be.

    automatic: whether "auto" and None, which mean the same, leave it to us.
    """

    accepts: Callable[[Any], bool]
    needed: str
    automatic: bool = True

    def is_met_by(self, value: Any) -> bool:
        """Tell whether the option or setting may have this value."""
        return (self.automatic and is_left_to_us(value)) or self.accepts(value)


def is_left_to_us(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def one_of(*choices: str, automatic: bool = True) -> SettingRule:
    quoted = ", ".join(repr(x) for x in (("auto", *choices) if automatic else choices))
    return SettingRule(
        lambda value: isinstance(value, str) and value in choices,
        f"one of {quoted}",
        automatic,
    )


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_positive(value: Any) -> bool:
    return type(value) is int and value > 0


def is_text(value: Any) -> bool:
    """Tell whether the value is a text that is not empty, as a name or a path."""
    return isinstance(value, str) and bool(value)


BOOL = SettingRule(
    lambda value: isinstance(value, bool), "True or False", automatic=False
)


def setting(name: str) -> Any:
    """Return the value of `cpcompile.config.<name>`; None where it is left to us.

    Raises: OptionError if it is of a wrong type or out of range.
    """
    rule = _RULES[name]
    value = getattr(config, name)
    if not rule.is_met_by(value):
        raise OptionError(f"cpcompile.config.{name} is {value!r}; needed {rule.needed}")
    return None if rule.automatic and is_left_to_us(value) else value


def setting_names() -> list[str]:
    return list(_RULES)


def _is_names(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_NOT_NEGATIVE = SettingRule(
    lambda v: _is_number(v) and v >= 0,
    "a number that is not negative, such as 0.05",
    automatic=False,
)
_RULES = {
    "agreement_timeout_seconds": SettingRule(
        lambda v: _is_number(v) and v > 0, "a positive number of seconds", False
    ),
    "check_overlap": BOOL,
    "check_ranks": SettingRule(
        lambda v: v == "first" or (is_count(v) and v <= 10_000),
        '"auto", "first", or a number of calls up to 10000, 0 for never',
    ),
    "eager_strategy": one_of(*(s.value for s in EAGER_STRATEGIES), automatic=False),
    "fold_repeated_blocks": BOOL,
    "gather_outputs_megabytes": SettingRule(
        lambda v: type(v) in (int, float) and v >= 0,
        '"auto" or a number of megabytes, 0 for none, math.inf for all',
    ),
    "gradient_bucket_megabytes": SettingRule(
        lambda v: _is_number(v) and v >= 0,
        '"auto" or a number of megabytes, 0 for none',
    ),
    "hardware": SettingRule(
        is_text, '"auto", the name of a profile, or the path of a .json file'
    ),
    "inductor_mode": SettingRule(is_text, '"auto" or the name of a mode of Inductor'),
    "memory_budget": SettingRule(is_positive, '"auto" or a positive number of bytes'),
    "offload_activations": BOOL,
    "outputs": SettingRule(_is_names, '"auto" or a list of names of results'),
    "profile": SettingRule(is_text, "None or a path"),
    "step_kernel": one_of("triton", "aten_flash", "aten_math"),
    "tie_fraction": _NOT_NEGATIVE,
    "tile_least_megabytes": SettingRule(
        lambda v: _is_number(v) and v > 0, "a positive number of megabytes", False
    ),
    "tile_megabytes": SettingRule(
        lambda v: _is_number(v) and v > 0, '"auto" or a positive number of megabytes'
    ),
    "unroll": SettingRule(is_count, '"auto" or a number of ranks, 0 for never'),
    "whole_mask_share": _NOT_NEGATIVE,
}
