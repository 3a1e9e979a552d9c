"""Select the profile that describes the running machine."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from cpcompile.cost.hardware.profile import (
    HardwareProfile,
    load_profile,
    profile_names,
    read_profile,
)

# For each device type: the profile of devices that no shipped profile is named after.
_PROFILE_OF_TYPE = {"cpu": "cpu", "cuda": "h100_sxm"}


def calibrated_path(device_type: str, ranks: int) -> Path:
    """Return where `cpcompile calibrate` writes a profile, by device type and ranks.

    It is the profile of this machine and this size of group. The folder is
    $CPCOMPILE_CACHE, or cpcompile in the user's cache folder.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("CPCOMPILE_CACHE") or Path(cache) / "cpcompile")
    return folder / "profiles" / f"{device_type}_{ranks}_ranks.json"


def profile_for_device(
    device_type: str, device_name: str = "", ranks: int = 1
) -> HardwareProfile:
    """Return the calibrated profile of this machine, or the shipped one that fits best.

    Args:
        device_type: of torch, such as "cuda".
        device_name: such as "NVIDIA H100 80GB HBM3", to find a shipped profile.
        ranks: size of the group.

    Raises: ValueError for device types without a profile, or a broken calibrated file.
    """
    calibrated = calibrated_path(device_type, ranks)
    if calibrated.is_file():
        return read_profile(calibrated)
    return shipped_profile(device_type, device_name)


def shipped_profile(device_type: str, device_name: str = "") -> HardwareProfile:
    """Return the shipped profile that fits best; arguments as of profile_for_device."""
    if device_type not in _PROFILE_OF_TYPE:
        raise ValueError(
            f"device type {device_type!r} has no hardware profile: there are profiles "
            f"for {', '.join(_PROFILE_OF_TYPE)}; run `cpcompile calibrate`, or name "
            "one in cpcompile.config.hardware"
        )
    return load_profile(_shipped_name(device_name) or _PROFILE_OF_TYPE[device_type])


def _shipped_name(device_name: str) -> str | None:
    """Return the longest name of a profile whose words are all in the device's name."""
    words = device_name.upper().replace("-", " ").split()
    words += [one + other for one, other in pairwise(words)]  # "RTX 4090 D"
    kinds = {name.upper().replace("_", " "): name for name in profile_names()}
    fits = [
        kind
        for kind in kinds
        if all(part in words for part in kind.removesuffix(" SXM").split())
    ]
    return kinds[max(fits, key=len)] if fits else None
