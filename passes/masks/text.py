"""Names of masks, for people: "causal, window 8"."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_text(value: Tensor) -> str:
    """What a mask is called that is held for all pairs."""
    return f"dense {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def key_ranges_text(lo: Tensor, hi: Tensor, queries: int, keys: int) -> str:
    """What key ranges [B or 1, Sq or 1, 1] are called, "key ranges" if nothing else."""
    if lo.shape[0] != 1:
        return "key ranges per batch row"
    rows = torch.arange(queries)
    first, after = (x[0, :, 0].expand(queries) for x in (lo, hi))
    chunk = _chunk(first, rows)
    before = _distance(-first, -rows, 0)
    ahead = _distance(after, rows, keys)
    starts_at_0, ends_at_last = not bool((first > 0).any()), bool((after == keys).all())
    if starts_at_0 and ahead is not None:
        return "causal" if ahead == 1 else f"causal, shifted by {ahead - 1}"
    if chunk is not None:
        if torch.equal(after, rows + 1):
            return f"causal, chunks of {chunk}"
        if torch.equal(after, (first + chunk).clamp(max=keys)):
            return f"chunks of {chunk}"
    if before is not None and ahead is not None:
        if ahead == 1:
            return f"causal, window {before + 1}"
        if ahead == before + 1:
            return f"window of {before} to each side"
        return f"window of {before} back and {ahead - 1} ahead"
    if before is not None and ends_at_last:
        return f"keys from {before} back on"
    return "key ranges"


def _distance(limit: Tensor, rows: Tensor, end: int) -> int | None:
    """The one distance of a limit from its row, where it does not lie at the end."""
    found = (limit - rows)[limit < end]
    if not len(found) or not torch.equal(limit, (rows + found[0]).clamp(max=end)):
        return None
    return int(found[0])


def _chunk(first: Tensor, rows: Tensor) -> int | None:
    """The size of chunks, if each row starts with its chunk."""
    later = (first > 0).nonzero()
    chunk = int(later[0]) if len(later) else 0
    if not chunk:
        return None
    return chunk if torch.equal(first, rows // chunk * chunk) else None
