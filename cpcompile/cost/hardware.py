"""Measured rates of a machine: one JSON file each, every value with its source."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

PROFILES = Path(__file__).parent / "profiles"
_NAMES = frozenset({"name", "sources"})  # the fields that are not numbers
_MAY_BE_ZERO = frozenset({"link_latency_seconds", "kernel_launch_seconds"})
_PROFILE_OF_DEVICE = {"cpu": "cpu", "cuda": "h100_sxm"}


@dataclass(frozen=True)
class HardwareProfile:
    """What the cost model knows of one rank and its link; all rates are achieved ones.

    FLOPs are 4 per (query, key) pair and head dim in the forward, 10 in the backward;
    the causal rates count only pairs that the mask leaves.
    """

    name: str
    forward_flops_per_second: float
    causal_forward_flops_per_second: float
    backward_flops_per_second: float
    causal_backward_flops_per_second: float
    link_bytes_per_second: float  # to the next rank, one direction
    collective_bytes_per_second: float  # sent per rank in all-gather, reduce-scatter
    link_latency_seconds: float  # per message or collective
    memory_bytes_per_second: float  # read and written bytes together
    kernel_launch_seconds: float
    merge_bytes_per_element: float  # read and written to add one part to a sum
    sources: Mapping[str, str] = field(compare=False, repr=False)


def load_profile(name: str) -> HardwareProfile:
    """The profile that ships with cpcompile under `name`.

    Raises: ValueError for an unknown name, with the names there are and the nearest.
    """
    names = sorted(path.stem for path in PROFILES.glob("*.json"))
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ValueError(
            f"hardware profile {name!r} is unknown: there are {', '.join(names)}; "
            f"did you mean {near[0]!r}?"
        )
    return _shipped(name)


def profile_for_device(device_type: str) -> HardwareProfile:
    """The profile assumed for a torch device type where the user named none.

    Raises: ValueError for device types without a profile.
    """
    if device_type not in _PROFILE_OF_DEVICE:
        raise ValueError(
            f"device type {device_type!r} has no hardware profile: there are profiles "
            f"for {', '.join(_PROFILE_OF_DEVICE)}; name one with load_profile"
        )
    return load_profile(_PROFILE_OF_DEVICE[device_type])


def read_profile(path: Path) -> HardwareProfile:
    """The profile in a JSON file; its name is the file's name.

    The file has one number per field of HardwareProfile and an object `sources` with
    one text per number. Raises: ValueError that names the field and the file.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("sources"), dict):
        raise ValueError(f"{path}: needs an object with an object `sources` inside")
    sources = content.pop("sources")
    wanted = [f.name for f in fields(HardwareProfile) if f.name not in _NAMES]
    for key in sorted({*content, *sources} - set(wanted)):
        near = difflib.get_close_matches(key, wanted, n=1, cutoff=0.0)
        raise ValueError(f"{path}: field {key!r} is unknown; did you mean {near[0]!r}?")
    for key in wanted:
        _check_field(path, key, content.get(key), sources.get(key))
    numbers = {key: float(content[key]) for key in wanted}
    return HardwareProfile(name=path.stem, sources=sources, **numbers)


@cache
def _shipped(name: str) -> HardwareProfile:
    return read_profile(PROFILES / f"{name}.json")


def _check_field(path: Path, key: str, value: object, source: object) -> None:
    where = f"{path}: field {key!r}"
    if value is None:
        raise ValueError(f"{where} is missing; add a number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {value!r}; it must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{where} is {value}; it must be finite and not negative")
    if value == 0 and key not in _MAY_BE_ZERO:
        raise ValueError(f"{where} is 0; it must be positive")
    if not isinstance(source, str) or not source:
        raise ValueError(f"{where} has no text in `sources`; say where it comes from")
