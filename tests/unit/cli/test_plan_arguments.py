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
    ("read", "text", "value"),
    [
        (_ranks, "8", (8,)),
        (_ranks, "2,4,8", (2, 4, 8)),
        (_ranks, "1..8", (1, 2, 4, 8)),
        (_ranks, "1..1024", tuple(2**i for i in range(11))),
        (_ranks, "3..24", (3, 6, 12, 24)),
        (_ranks, "4..4", (4,)),
        (_ranks, "2..5", (2, 4)),
        (_ranks, "1..4,3, 4", (1, 2, 4, 3)),
        (bytes_of_text, "1", 1),
        (bytes_of_text, "8589934592", 2**33),
        (bytes_of_text, "8GiB", 2**33),
        (bytes_of_text, "8 gib", 2**33),
        (bytes_of_text, "1.5MiB", 1572864),
        (bytes_of_text, "80GB", 80e9),
        (bytes_of_text, "2k", 2000),
        (bytes_of_text, "3Ki", 3072),
        (_count, "7", 7),
        (_count, "128k", 131072),
        (_count, "1M", 2**20),
        (_override, "overlap_fraction = 0.5", ("overlap_fraction", 0.5)),
    ],
)
def test_words(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (_ranks, ["", "0", "-1", "8..", "..8", "1...8", "a", "1,,2"], "is not like 8"),
        (_ranks, ["1..100000"], "1 to 65536 ranks"),
        (bytes_of_text, ["0", "-1", "GiB", "1XB", "i", "1 i"], "no positive number of"),
    ],
)
def test_words_that_are_no_numbers(read, texts, message):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            read(text)
