"""Say which tokens a query sees: all before it, or those of its document.

Packed documents lie one after the other in the sequence, each causal in itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

# Uneven documents, so that no border of a chunk is one of all documents.
PARTS = (5, 1, 3, 7, 2, 6, 4, 4)


class Mask(Enum):
    """What hides keys from a query."""

    CAUSAL = "causal"
    PACKED = "packed"


@functools.cache
def lengths(tokens: int) -> tuple[int, ...]:
    """Return the tokens of each document; the shares are those of PARTS."""
    unit, rest = divmod(tokens, sum(PARTS))
    assert not rest, f"got {tokens} tokens; needed a multiple of {sum(PARTS)}"
    return tuple(part * unit for part in PARTS)


@functools.cache
def starts(tokens: int) -> Tensor:
    """Return, for each token, the first one of its document; int64 [tokens]."""
    counts = torch.tensor(lengths(tokens))
    return torch.repeat_interleave(counts.cumsum(0) - counts, counts)


def visible(tokens: int) -> Tensor:
    """Return bool [tokens, tokens]: the keys (columns) a query of documents sees."""
    place = torch.arange(tokens)
    before = place <= place[:, None]
    return before & (place >= starts(tokens)[:, None])


def key_ranges(tokens: int) -> Tensor:
    """Return the first key of each query, and the end: int64 [1, tokens, 2]."""
    return torch.stack((starts(tokens), torch.arange(tokens) + 1), dim=-1)[None]


def live_fraction(mask: Mask, tokens: int) -> float:
    """Return the share of causal pairs that the mask leaves."""
    if mask is Mask.CAUSAL:
        return 1.0
    seen = torch.arange(tokens) + 1 - starts(tokens)
    return float(seen.sum()) / (tokens * (tokens + 1) / 2)


def attend(mask: Mask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attend on one process, q, k and v [B, H, tokens, D]; one call per document."""

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.split(lengths(x.shape[2]), dim=2) for x in (q, k, v))
        return torch.cat([causal(*part) for part in zip(*parts, strict=True)], dim=2)

    return causal if mask is Mask.CAUSAL else packed
