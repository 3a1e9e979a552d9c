"""Masks of whole sequences by name, as the operators take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HEADS = 4
BATCH = 2
WINDOW = 9


@dataclass(frozen=True)
class Fields:
    """A mask of whole sequences, as the operators take it."""

    key_ranges: Tensor | None = None
    q_segment_ids: Tensor | None = None
    kv_segment_ids: Tensor | None = None
    bias: Tensor | None = None

    def visible(self, q_len: int, kv_len: int) -> Tensor:
        """Without a floating bias: bool [B or 1, H or 1, q_len, kv_len]."""
        seen = torch.ones(1, 1, q_len, kv_len, dtype=torch.bool)
        key = torch.arange(kv_len)
        if self.key_ranges is not None:
            lower, upper = self.key_ranges[:, None, :, :, None].unbind(3)
            seen = seen & (key >= lower) & (key < upper)
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            seen = seen & (
                self.q_segment_ids[:, None, :, None]
                == self.kv_segment_ids[:, None, None]
            )
        if self.bias is not None and self.bias.dtype == torch.bool:
            seen = seen & self.bias
        return seen


def band(low: Tensor | int, high: Tensor) -> Tensor:
    """Key ranges [B or 1, q_len, 2] from `low` to `high`, int32."""
    low = torch.as_tensor(low).expand_as(high)
    key_ranges = torch.stack([low, high], -1).to(torch.int32)
    return key_ranges if key_ranges.ndim == 3 else key_ranges.unsqueeze(0)


def _ids(*values: Tensor) -> dict[str, Tensor]:
    q_segment_ids, kv_segment_ids = (x.to(torch.int32) for x in values)
    return {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids}


def padding(kv_len: int, holes: bool) -> Tensor:
    """kv_segment_ids [B, kv_len] of keys that end early, and are missing in between."""
    key, batch = torch.arange(kv_len), torch.arange(BATCH).unsqueeze(1)
    hidden = key >= kv_len - 5 * batch - 1
    if holes:
        hidden = hidden | ((key + batch) % 4 == 1)
    return -hidden.to(torch.int32)


def documents(length: int, kv_len: int) -> dict[str, Tensor]:
    """Of 11 and of 17 tokens, aligned at the ends of the sequences."""
    sizes = torch.tensor([[11], [17]])
    q, k = (torch.arange(n) + max(length, kv_len) - n for n in (length, kv_len))
    return _ids(q // sizes, k // sizes)


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(77)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def some_bool(heads: int, q_len: int, kv_len: int) -> Tensor:
    """Every third row sees nothing."""
    seen = noise(BATCH, heads, q_len, kv_len) > 0
    return seen & (torch.arange(q_len) % 3 > 0).unsqueeze(1)


def low_distances(q_len: int, kv_len: int) -> Tensor:
    """Every other one hidden by the lowest number, or by -inf; all rows see a key."""
    bias = noise(1, HEADS, q_len + kv_len - 1).clone()
    bias[..., ::4] = torch.finfo(torch.float64).min  # becomes that of the dtype
    bias[..., 2::4] = -torch.inf
    return bias


def lowest(q_len: int, kv_len: int) -> Tensor:
    """A bias with the lowest number, and -inf, where a key is hidden."""
    bias = noise(1, 1, q_len, kv_len).clone()
    bias[..., 1::3] = -torch.inf
    bias[..., 2::3] = torch.finfo(torch.float64).min  # becomes that of the dtype
    return bias


# Of the last key of each row of a causal mask, and the numbers of queries and keys.
MASKS: dict[str, Callable[[Tensor, int, int], Fields]] = {
    "causal": lambda i, q, k: Fields(band(0, i + 1)),
    "window": lambda i, q, k: Fields(band(i + 1 - WINDOW, i + 1)),
    "both sides": lambda i, q, k: Fields(band(i - WINDOW, i + WINDOW + 1)),
    "chunked": lambda i, q, k: Fields(band(i // 12 * 12, i + 1)),
    "prefix": lambda i, q, k: Fields(
        band(0, torch.maximum(i + 1, torch.tensor([[5], [40]])))
    ),
    "falling": lambda i, q, k: Fields(band(i // 5, k - i)),
    "padding": lambda i, q, k: Fields(
        **_ids(torch.zeros(1, q), padding(k, holes=False))
    ),
    "holes": lambda i, q, k: Fields(**_ids(torch.zeros(1, q), padding(k, holes=True))),
    "left padding": lambda i, q, k: Fields(
        band(0, i + 1),
        **_ids(torch.zeros(1, q), padding(k, holes=False).flip(1)),
    ),
    "documents": lambda i, q, k: Fields(**documents(q, k)),
    "interleaved": lambda i, q, k: Fields(
        **_ids(torch.arange(q).unsqueeze(0) % 3, torch.arange(k).unsqueeze(0) % 5)
    ),
    "causal documents": lambda i, q, k: Fields(band(0, i + 1), **documents(q, k)),
    "padded documents": lambda i, q, k: Fields(
        band(i + 1 - WINDOW, i + 1),
        documents(q, k)["q_segment_ids"],
        documents(q, k)["kv_segment_ids"].masked_fill(padding(k, holes=True) < 0, -1),
    ),
    "nothing": lambda i, q, k: Fields(band(0, i * 0)),
    "bool": lambda i, q, k: Fields(bias=some_bool(1, q, k)),
    "bool of heads": lambda i, q, k: Fields(
        band(0, i + 1), bias=some_bool(HEADS, q, k)
    ),
    "bias": lambda i, q, k: Fields(bias=noise(1, HEADS, q, k)),
    "bias of batch": lambda i, q, k: Fields(band(0, i + 1), bias=noise(BATCH, 1, q, k)),
    "full bias": lambda i, q, k: Fields(
        bias=noise(BATCH, HEADS, q, k), **documents(q, k)
    ),
    "by key": lambda i, q, k: Fields(band(0, i + 1), bias=noise(BATCH, HEADS, k)),
    "by distance": lambda i, q, k: Fields(
        band(i + 1 - WINDOW, i + 1), bias=noise(1, HEADS, q + k - 1)
    ),
    "distance of batch": lambda i, q, k: Fields(
        bias=noise(BATCH, 1, q + k - 1), **documents(q, k)
    ),
    "low distances": lambda i, q, k: Fields(bias=low_distances(q, k)),
    "lowest": lambda i, q, k: Fields(bias=lowest(q, k)),
}


WITHOUT_BIAS = [  # of pairs, which have an order
    name
    for name, mask in MASKS.items()
    if (bias := mask(torch.arange(4), 4, 4).bias) is None or bias.ndim == 3
]
