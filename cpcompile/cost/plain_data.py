"""Plans, explanations and reports as plain dicts, lists, strings and numbers, for JSON.

A dataclass becomes a dict of its fields, in their order: CPDegrees is {"ulysses",
"ring", "inner"}. An enum becomes its value, a tuple a list. A Candidate has its `label`
as well. A plan has the label of its runner-up, and the name of its profile, whose
numbers are without their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from cpcompile.cost.hardware.profile import NUMBERS, HardwareProfile
from cpcompile.cost.plans import Candidate, Plan


def to_dict(value: Any) -> Any:
    """Convert `value` to plain data for JSON.

    Raises: TypeError for what is no dataclass, enum, mapping, sequence, str, number or
    None.
    """
    if isinstance(value, HardwareProfile):  # without where its numbers come from
        return {name: getattr(value, name) for name in ("name", *NUMBERS)}
    if is_dataclass(value) and not isinstance(value, type):
        record = {f.name: to_dict(getattr(value, f.name)) for f in fields(value)}
        return record | _added(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_dict(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [to_dict(element) for element in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} has no form in JSON: {value!r}")


def to_json(value: Any) -> str:
    """Return `to_dict(value)` as indented text."""
    return json.dumps(to_dict(value), indent=2)


def _added(value: object) -> dict[str, Any]:
    if isinstance(value, Candidate):
        return {"label": value.label}
    if isinstance(value, Plan):
        other = value.runner_up
        label = None if other is None else other.label
        return {"runner_up": label, "hardware": value.hardware}
    return {}
