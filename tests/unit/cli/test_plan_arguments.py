"""Words of the command line become numbers."""

import argparse

import pytest

from cpcompile.apps.cli.plan_arguments import (
    _count,
    _override,
    _ranks,
    bytes_of_text,
)

WORDS = {
    _ranks: {
        "8": (8,), "2,4,8": (2, 4, 8), "1..8": (1, 2, 4, 8), "3..24": (3, 6, 12, 24),
        "4..4": (4,), "2..5": (2, 4), "1..4,3, 4": (1, 2, 4, 3),
        "1..1024": tuple(2**i for i in range(11)),
    },
    bytes_of_text: {
        "1": 1, "8589934592": 2**33, "8GiB": 2**33, "8 gib": 2**33, "1.5MiB": 1572864,
        "80GB": 80e9, "2k": 2000, "3Ki": 3072,
    },
    _count: {"7": 7, "128k": 131072, "1M": 2**20},
    _override: {"overlap_fraction = 0.5": ("overlap_fraction", 0.5)},
}  # fmt: skip


@pytest.mark.parametrize("read", WORDS)
def test_words(read):
    assert {text: read(text) for text in WORDS[read]} == WORDS[read]


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
