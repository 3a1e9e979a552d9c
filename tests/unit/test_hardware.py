"""Hardware profiles: what ships, and what a wrong file or name says."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from textwrap import fill

import pytest
from expecttest import assert_expected_inline

from cpcompile.cost.hardware import (
    PROFILES,
    HardwareProfile,
    load_profile,
    profile_for_device,
    read_profile,
)

NUMBERS = [f.name for f in fields(HardwareProfile) if f.name not in ("name", "sources")]


def message_for(tmp_path: Path, **changes: object) -> str:
    """The error for the shipped CPU profile with changes; None removes a field."""
    content = json.loads((PROFILES / "cpu.json").read_text(encoding="utf-8"))
    content |= changes
    content = {key: value for key, value in content.items() if value is not None}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_profile(path)
    return fill(str(caught.value).replace(str(path), "mine.json"), 80)


@pytest.mark.parametrize("name", ["cpu", "h100_sxm"])
def test_shipped_profiles_say_where_every_number_is_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.sources) == set(NUMBERS)
    assert profile.causal_forward_flops_per_second <= profile.forward_flops_per_second
    # Achieved, not peak: below 989 TFLOP/s dense and 450 GB/s per direction.
    assert profile.forward_flops_per_second < 989e12
    assert profile.link_bytes_per_second < 450e9


def test_profile_for_device() -> None:
    assert profile_for_device("cpu") is load_profile("cpu")
    assert profile_for_device("cuda") is load_profile("h100_sxm")
    with pytest.raises(ValueError) as caught:
        profile_for_device("xla")
    assert_expected_inline(
        fill(str(caught.value), 80),
        """\
device type 'xla' has no hardware profile: there are profiles for cpu, cuda;
name one with load_profile""",
    )


def test_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ValueError) as caught:
        load_profile("h100")
    assert_expected_inline(
        fill(str(caught.value), 80),
        """\
hardware profile 'h100' is unknown: there are cpu, h100_sxm; did you mean
'h100_sxm'?""",
    )


def test_missing_field(tmp_path: Path) -> None:
    message = message_for(tmp_path, link_bytes_per_second=None)
    assert_expected_inline(
        message, """mine.json: field 'link_bytes_per_second' is missing; add a number"""
    )


def test_misspelt_field(tmp_path: Path) -> None:
    message = message_for(tmp_path, link_bytes_per_secnd=1e9)
    assert_expected_inline(
        message,
        """\
mine.json: field 'link_bytes_per_secnd' is unknown; did you mean
'link_bytes_per_second'?""",
    )


def test_negative_field(tmp_path: Path) -> None:
    message = message_for(tmp_path, kernel_launch_seconds=-1e-6)
    assert_expected_inline(
        message,
        """\
mine.json: field 'kernel_launch_seconds' is -1e-06; it must be finite and not
negative""",
    )


def test_field_without_source(tmp_path: Path) -> None:
    sources = dict.fromkeys(NUMBERS[1:], "measured")
    assert_expected_inline(
        message_for(tmp_path, sources=sources),
        """\
mine.json: field 'forward_flops_per_second' has no text in `sources`; say where
it comes from""",
    )


@pytest.mark.parametrize("value", [0, "fast", True, float("inf"), float("nan")])
def test_rates_are_positive_numbers(tmp_path: Path, value: object) -> None:
    message = message_for(tmp_path, memory_bytes_per_second=value)
    assert message.startswith("mine.json: field 'memory_bytes_per_second' is ")


def test_latencies_may_be_zero(tmp_path: Path) -> None:
    content = json.loads((PROFILES / "cpu.json").read_text(encoding="utf-8"))
    content["link_latency_seconds"] = 0
    path = tmp_path / "ideal.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    profile = read_profile(path)
    assert (profile.name, profile.link_latency_seconds) == ("ideal", 0.0)
