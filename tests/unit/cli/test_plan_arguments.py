"""Words of the command line become numbers."""

import argparse

import pytest

from cpcompile.apps.cli.plan_arguments import (
    _count,
    _override,
    _ranks,
    bytes_of_text,
)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("8", (8,)),
        ("2,4,8", (2, 4, 8)),
        ("1..8", (1, 2, 4, 8)),
        ("1..1024", tuple(2**i for i in range(11))),
        ("3..24", (3, 6, 12, 24)),
        ("4..4", (4,)),
        ("2..5", (2, 4)),
        ("1..4,3, 4", (1, 2, 4, 3)),
    ],
)
def test_ranks(text, ranks):
    assert _ranks(text) == ranks


@pytest.mark.parametrize("text", ["", "0", "-1", "8..", "..8", "1...8", "a", "1,,2"])
def test_no_ranks(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not like 8"):
        _ranks(text)


def test_too_many_ranks():
    with pytest.raises(argparse.ArgumentTypeError, match="1 to 65536 ranks"):
        _ranks("1..100000")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("8589934592", 2**33),
        ("8GiB", 2**33),
        ("8 gib", 2**33),
        ("1.5MiB", 1572864),
        ("80GB", 80e9),
        ("2k", 2000),
        ("3Ki", 3072),
    ],
)
def test_bytes(text, size):
    assert bytes_of_text(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "GiB", "1XB", "i", "1 i"])
def test_no_bytes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="no positive number of bytes"):
        bytes_of_text(text)


def test_counts():
    assert [_count(text) for text in ("7", "128k", "1M")] == [7, 131072, 2**20]


def test_overrides():
    assert _override("overlap_fraction = 0.5") == ("overlap_fraction", 0.5)
