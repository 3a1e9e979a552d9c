"""Put reasons of DTensor and AOTAutograd in words that a user can use."""

from __future__ import annotations

import re

_PLAIN_MEETS_SHARDED = "plain tensors meet sharded ones inside of it"
# What torch 2.11 to 2.13 says, and what DTensor lacks there.
_WORDS = (
    (
        r"Operator (\S+?)(?:\.\w+)? does not have a sharding strategy registered\.?",
        r"DTensor has no sharding rule for \1",
    ),
    (
        r"'FunctionalTensor' object has no attribute '_local_tensor'",
        _PLAIN_MEETS_SHARDED,
    ),
    (r"Attempting to use FunctionalTensor on its own.*", _PLAIN_MEETS_SHARDED),
    (
        r"(\S+?)(?:\.\w+)? got mixed torch\.Tensor and DTensor,? .*",
        rf"{_PLAIN_MEETS_SHARDED}, at \1",
    ),
    (
        r"Attempted to (?:un)?flatten .*(?:sharded|sharding).*",
        "it views a dimension as others that are split elsewhere, in uneven parts",
    ),
    (
        r"Sharding propagation failed (?:for|on) (?:Op\(op=)?([\w.]+?)(?:\.\w+)?[,)].*",
        r"DTensor's sharding rule for \1 does not know these operands",
    ),
    (
        r"Cannot create a shape with uneven .*|Cannot unflatten unevenly sharded.*",
        "it splits a dimension of which the ranks have uneven parts",
    ),
)
_CLASS = r"\b(?:[A-Z]\w*)?(?:Error|Exception): "


def in_words(reason: str) -> str:
    """Say what DTensor lacks, instead of what it raises; other reasons stay."""
    for pattern, words in _WORDS:
        reason, count = re.subn(rf"(?:{_CLASS})?(?:{pattern})", words, reason)
        if count:
            break
    return reason.rstrip(". \n")
