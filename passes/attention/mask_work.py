"""What a mask leaves to compute and to send, for the cost model.

A mask of static key ranges says it exactly, and for the slowest rank. Of ids, which are
data, nothing is known when a plan is made: they count as if they hid nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.known_masks import remember
from cpcompile.geometry.layout import Chunks, TokenLayout
from cpcompile.geometry.mask_blocks import MaskBlocks, Tile, spans
from cpcompile.geometry.masks import Mask
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.masks.writer import constant_value
from cpcompile.plans import Layout


@dataclass(frozen=True)
class MaskWork:
    """Fields of a Workload, see there."""

    live_fraction: float = 1.0
    mean_live_fraction: float | None = None
    ring_steps: int | None = None
    bias_bytes: int = 0


NO_MASK = MaskWork()


def mask_work(
    mask: Mask, q_len: int, kv_len: int, ranks: int, layout: Layout
) -> MaskWork:
    """What `mask` leaves of attention from q_len to kv_len tokens on so many ranks."""
    bias_bytes = 0
    if mask.bias is not None:
        bias = fake_value(mask.bias)
        bias_bytes = bias.numel() * bias.element_size()
    key_ranges = None if mask.key_ranges is None else constant_value(mask.key_ranges)
    if key_ranges is None or not q_len or not kv_len:
        return MaskWork(bias_bytes=bias_bytes)
    with torch.no_grad():
        ranges = KeyRanges.of(key_ranges.cpu(), None, None, q_len, kv_len, _HOST)
    pairs = (ranges.upper - ranges.lower).clamp(min=0).sum(0)
    slowest = max(
        int(pairs[positions].sum()) for positions in _positions(layout, q_len, ranks)
    )
    rows, batch = Chunks(q_len, ranks).size, ranges.lower.shape[0]
    return MaskWork(
        live_fraction=slowest / (batch * rows * kv_len),
        mean_live_fraction=int(pairs.sum()) / (batch * q_len * kv_len),
        ring_steps=_ring_steps(ranges, q_len, kv_len, ranks, layout),
        bias_bytes=bias_bytes,
    )


_HOST = torch.device("cpu")


def known_mask(mask: Mask, q_len: Any, kv_len: Any) -> str | None:
    """The name of a mask all of whose integers are known; None if they are data."""
    nodes = (mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
    values = [None if node is None else constant_value(node) for node in nodes]
    known = [value is not None for value in values]
    if known != [node is not None for node in nodes]:
        return None
    if not isinstance(q_len, int) or not isinstance(kv_len, int):
        return None
    return remember(values, q_len, kv_len)


def _positions(layout: Layout, length: int, ranks: int) -> list[Tensor]:
    tokens = TokenLayout.of(layout, length, ranks)
    return [tokens.positions(rank) for rank in range(ranks)]


def _ring_steps(
    ranges: KeyRanges, q_len: int, kv_len: int, ranks: int, layout: Layout
) -> int:
    """How many distances around the ring any rank needs keys from, its own included."""
    rows, keys = (
        [spans(layout, Chunks(length, ranks), rank) for rank in range(ranks)]
        for length in (q_len, kv_len)
    )
    whole = Tile(max(q_len, 1), max(kv_len, 1))
    needed = MaskBlocks.of(ranges, rows, keys, 0, whole, False).needed
    distances = {
        (rank - source) % ranks
        for rank, sources in enumerate(needed)
        for source, is_needed in enumerate(sources)
        if is_needed
    }
    return len(distances | {0})
