"""Measured rates of a machine: one JSON file each, every value with its source."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).parent / "profiles"
# What people call it -> the file's name, where leaving out "_sxm" is not enough.
_ALIASES = {"4090": "rtx_4090", "4090d": "rtx_4090d"}
_NOT_NUMBERS = frozenset({"name", "sources", "about"})
# Numbers that may not be 0: rates but that of a bridge, speeds, and what there is.
_POSITIVE = re.compile(
    r"(?!bridge).*_per_second|speed_of_.*|alone_speedup|memory_bytes|.*_per_node"
)


@dataclass(frozen=True)
class HardwareProfile:
    """What the cost model knows of one rank and its links; all rates are achieved ones.

    FLOPs are 4 per (query, key) pair and head dim in the forward, 10 in the backward;
    the causal rates count only pairs that the mask leaves. Rates are those of long
    sequences at head dim 128 in the dtype whose speed is 1; the fields below them say
    what is lost at other sizes and in other dtypes.
    """

    name: str
    forward_flops_per_second: float
    causal_forward_flops_per_second: float
    backward_flops_per_second: float
    causal_backward_flops_per_second: float
    speed_of_16_bits: float  # of bfloat16 and float16 inputs, over the rates above
    speed_of_32_bits: float
    speed_of_64_bits: float
    softmax_head_dims: float  # a pair costs as much as a head dim larger by this
    forward_row_overhead_keys: float  # a row costs as much as this many more keys
    backward_row_overhead_keys: float
    tile_tokens: float  # side of the tiles that a causal kernel computes whole
    parallel_tiles: float  # tiles of rows that run at once; fewer leave cores idle
    alone_speedup: float  # of a rank while others idle; 1 on cores of its own
    kernel_launch_seconds: float
    step_issue_seconds: float  # of the host for a ring step; a shorter step waits
    memory_bytes: float  # capacity
    memory_bytes_per_second: float  # read and written bytes together
    merge_bytes_per_element: float  # moved per element of the output in a ring step
    backward_merge_bytes_per_element: float  # per element of the queries
    merge_latency_seconds: float  # per ring step, whatever its size
    overlap_fraction: float  # of a transfer inside of a node that computation hides
    link_bytes_per_second: float  # to the next rank of a ring, one direction
    link_latency_seconds: float  # per message
    collective_bytes_per_second: float  # sent per rank in an all-gather
    reduce_scatter_bytes_per_second: float
    all_to_all_bytes_per_second: float
    collective_latency_seconds: float  # per collective
    collective_latency_per_rank_seconds: float  # and for every rank but two
    ranks_per_bridge: float  # ranks behind one host bridge; 0: a node has none
    bridge_bytes_per_second: float  # one direction, for all ranks behind it together
    ranks_per_node: float  # ranks that the links above connect
    network_cards_per_node: float
    inter_node_bytes_per_second: float  # one direction, per card
    inter_node_latency_seconds: float  # added to a message that leaves the node
    sources: Mapping[str, str] = field(compare=False, repr=False)
    # When and with which versions a profile was measured, and how well it fits.
    about: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def speed(self, bytes_per_element: int) -> float:
        """Return the factor of the rates for elements of `bytes_per_element` bytes."""
        if bytes_per_element <= 2:
            return self.speed_of_16_bits
        return (
            self.speed_of_32_bits if bytes_per_element <= 4 else self.speed_of_64_bits
        )

    def with_overrides(self, overrides: Mapping[str, float]) -> HardwareProfile:
        """Return the profile with other numbers for the named fields.

        Raises: ValueError for a name that is no number of a profile, or a bad number.
        """
        for name, value in overrides.items():
            _check_known("overrides", name)
            _check_number(f"overrides: {name!r}", name, value)
        numbers: dict[str, Any] = {k: float(v) for k, v in overrides.items()}
        return replace(self, **numbers)


NUMBERS = tuple(f.name for f in fields(HardwareProfile) if f.name not in _NOT_NUMBERS)


def profile_names() -> list[str]:
    """List the profiles that ship with cpcompile."""
    return sorted(_files())


def load_profile(name: str) -> HardwareProfile:
    """Load the profile that ships as `name` ("h100", "H100-PCIe"), or a .json file.

    Raises: ValueError for an unknown name, with the names there are and the nearest,
    or for a file that is no profile.
    """
    if name.endswith(".json"):
        return read_profile(Path(name))
    names = profile_names()
    spellings = {_plain(x.removesuffix("_sxm")): x for x in names} | _ALIASES
    spellings |= {_plain(x): x for x in names}
    shipped_name = spellings.get(_plain(name))
    if shipped_name is None:
        near = difflib.get_close_matches(_plain(name), spellings, n=1, cutoff=0.0)
        raise ValueError(
            f"hardware profile {name!r} is unknown: there are {', '.join(names)}, or "
            f"the path of a .json file; did you mean {spellings[near[0]]!r}?"
        )
    return _shipped(shipped_name)


def read_profile(path: Path) -> HardwareProfile:
    """Read the profile in a JSON file; its name is the file's name.

    The file has one number per field of HardwareProfile, an object `sources` with one
    text per number and perhaps an object `about`. Raises: ValueError that names the
    field and the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text: {error}") from error
    return parse_profile(path.stem, text, str(path))


def parse_profile(name: str, text: str, where: str) -> HardwareProfile:
    """Parse the text that `profile_text` made; errors begin with `where`."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is no JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("sources"), dict):
        raise ValueError(f"{where}: needs an object with an object `sources` inside")
    sources, about = content.pop("sources"), content.pop("about", {})
    if not isinstance(about, dict) or not all(
        isinstance(text, str) for text in about.values()
    ):
        raise ValueError(f"{where}: `about` is no object of texts; remove or fix it")
    for key in sorted({*content, *sources}):
        _check_known(where, key)
    for key in NUMBERS:
        label, source = f"{where}: field {key!r}", sources.get(key)
        if content.get(key) is None:
            raise ValueError(f"{label} is missing; add a number or calibrate again")
        _check_number(label, key, content[key])
        if not isinstance(source, str) or not source:
            raise ValueError(f"{label} has no text in `sources`; say its origin")
    numbers = {key: float(content[key]) for key in NUMBERS}
    return HardwareProfile(name=name, sources=sources, about=about, **numbers)


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write a file that `read_profile` reads, in whole or not at all.

    Raises: ValueError if `path` is a link, so that what it points to is kept; OSError.
    """
    require_no_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, so that it can take the place of an older file at once.
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(profile_text(profile) + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)  # as any file; temporary ones are for the owner
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def require_no_link(path: Path) -> None:
    """Raise ValueError if `path` is a link, which a profile would replace."""
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}; needed the path of a file: name "
            "that one, or remove the link"
        )


def profile_text(profile: HardwareProfile) -> str:
    """Return the profile as JSON."""
    content: dict[str, object] = {key: getattr(profile, key) for key in NUMBERS}
    content |= {"about": dict(profile.about), "sources": dict(profile.sources)}
    return json.dumps(content, indent=2)


@cache
def _files() -> dict[str, Path]:
    """Return the files of the shipped profiles, by name."""
    return {path.stem: path for path in PROFILES.rglob("*.json")}


@cache
def _shipped(name: str) -> HardwareProfile:
    return read_profile(_files()[name])


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _check_known(where: str, key: str) -> None:
    if key not in NUMBERS:
        near = difflib.get_close_matches(key, NUMBERS, n=1, cutoff=0.0)
        raise ValueError(
            f"{where}: field {key!r} is unknown; did you mean {near[0]!r}?"
        )


def _check_number(where: str, key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} is {value!r}; it must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(f"{where} is too large for a float") from error
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{where} is {value}; it must be finite and not negative")
    if value == 0 and _POSITIVE.fullmatch(key):
        raise ValueError(f"{where} is 0; it must be positive")
    if key == "overlap_fraction" and value > 1:
        raise ValueError(f"{where} is {value}; it must be from 0 to 1")
