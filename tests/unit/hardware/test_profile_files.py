"""Profile files that are broken, and files that must not be broken by writing one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

import pytest

from cpcompile.apps.calibration import main
from cpcompile.cost.hardware.profile import (
    load_profile,
    profile_text,
    read_profile,
    write_profile,
)


def changed(**changes: object) -> bytes:
    """A profile with some fields as others."""
    content = json.loads(profile_text(load_profile("cpu")))
    return json.dumps(content | changes).encode()


ABOUT = "`about` is no object of texts"
BROKEN = {
    "another encoding": (b"\xff\xfe{\x00", "is no UTF-8 text"),
    "deep": (b"[" * 100_000, "is no JSON"),
    "deep inside": (b'{"sources": {}, "about": ' + b'{"a":' * 100_000, "is no JSON"),
    "too large": (
        changed(memory_bytes=10**400),
        "field 'memory_bytes' is too large for a float",
    ),
    "many digits": (b'{"memory_bytes": ' + b"1" * 5000 + b"}", "is no JSON"),
    "about a text": (changed(about="x"), ABOUT),
    "about numbers": (changed(about={"x": 1}), ABOUT),
    "about nothing": (changed(about=None), ABOUT),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_error_of_ours_that_names_the_file(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "mine.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_profile(path)
    assert type(error.value) is ValueError
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_an_override_that_is_too_large() -> None:
    with pytest.raises(ValueError, match="'memory_bytes' is too large for a float"):
        load_profile("cpu").with_overrides({"memory_bytes": 10**400})


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "precious.json", tmp_path / "mine.json"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(ValueError, match=r"mine\.json is a link to .*precious\.json"):
        write_profile(load_profile("cpu"), link)
    assert target.read_text() == "precious" and link.is_symlink()


def test_which_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "mine.json"
    link.symlink_to(tmp_path / "none.json")
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--output", str(link)])
    assert "is a link to" in capsys.readouterr().err


def test_a_failure_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_profile(load_profile("h100"), path)
    before = path.read_text()
    with (
        mock.patch.object(os, "fsync", side_effect=OSError("no space left")),
        pytest.raises(OSError, match="no space left"),
    ):
        write_profile(load_profile("cpu"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
    write_profile(load_profile("cpu"), path)
    assert read_profile(path).sources == load_profile("cpu").sources
    assert list(tmp_path.iterdir()) == [path]
