"""Work that a mask leaves to compute and to send, for the cost model.

Static key ranges say it exactly, and for the slowest rank. Segment ids are data, of
which nothing is known when a plan is made: they count as if they hid nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cpcompile.cost.plans import RingWork
from cpcompile.cost.strategies import STRATEGIES, factorisations
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Chunks, Layout, Runs
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks, spans
from cpcompile.geometry.mask_cache import put_mask
from cpcompile.geometry.mask_tiles import Tile
from cpcompile.geometry.masks import Mask
from cpcompile.ops.attention_spec import is_of_positions

from ...graph.nodes import fake_value
from .analysis.mask_writer import constant_value


@dataclass(frozen=True)
class MaskWork:
    """Fields of a Workload that say what a mask leaves, see there."""

    live_fraction: float = 1.0
    mean_live_fraction: float | None = None
    ring_steps: int | None = None
    hybrid_rings: tuple[RingWork, ...] = ()
    bias_bytes: int = 0


NO_MASK = MaskWork()


def mask_work(
    mask: Mask, q_len: int, kv_len: int, ranks: int, layout: Layout
) -> MaskWork:
    """Compute the work that a mask leaves of attention on this number of ranks.

    q_len, kv_len: the numbers of queries and of keys.
    """
    bias_bytes = 0
    if mask.bias is not None and not is_of_positions(fake_value(mask.bias)):
        bias = fake_value(mask.bias)
        bias_bytes = bias.numel() * bias.element_size()
    key_ranges = None if mask.key_ranges is None else constant_value(mask.key_ranges)
    lengths = (q_len, kv_len)
    if key_ranges is None or 0 in lengths or layout not in _LAYOUTS:
        return MaskWork(bias_bytes=bias_bytes)
    with torch.no_grad():
        ranges = KeyRanges.of(key_ranges.cpu(), None, None, q_len, kv_len, _HOST)
    pairs = (ranges.upper - ranges.lower).clamp(min=0).sum(0)
    batch = ranges.lower.shape[0]

    def work_of(queries: Runs, keys: Runs) -> tuple[float, int]:
        """Return the share of pairs of the slowest rank, and the steps of a ring."""
        owned = [
            sum(
                int(pairs[x.position : x.stop].sum()) for x in spans(layout, queries, i)
            )
            for i in range(queries.ranks)
        ]
        steps = _ring_steps(ranges, queries, keys, layout)
        return max(owned) / (batch * queries.padded * kv_len), steps

    live_fraction, ring_steps = work_of(*(Runs.contiguous(n, ranks) for n in lengths))
    hybrids = []
    for degrees in factorisations(ranks):
        exchange = degrees.ulysses, degrees.inner == "ulysses"
        if layout is not Layout.CONTIGUOUS and degrees.inner == "ring":
            continue  # in no layout but the contiguous one, see why_not_run
        own = (Runs.of_hybrid(Chunks(n, ranks), *exchange) for n in lengths)
        hybrids.append(RingWork(degrees, *work_of(*own)))
    return MaskWork(
        live_fraction=live_fraction,
        mean_live_fraction=int(pairs.sum()) / (batch * q_len * kv_len),
        ring_steps=ring_steps,
        hybrid_rings=tuple(hybrids),
        bias_bytes=bias_bytes,
    )


_LAYOUTS = {x for row in STRATEGIES.values() for x in row.masked_layouts}
_HOST = torch.device("cpu")


def known_mask(mask: Mask, q_len: Any, kv_len: Any) -> str | None:
    """Return the name of a mask whose integers are all known; None if they are data."""
    nodes = (mask.key_ranges, mask.q_segment_ids, mask.kv_segment_ids)
    values = [None if node is None else constant_value(node) for node in nodes]
    are_known = [value is not None for value in values]
    if are_known != [node is not None for node in nodes]:
        return None
    if not isinstance(q_len, int) or not isinstance(kv_len, int):
        return None
    return put_mask(values, q_len, kv_len)


def _ring_steps(ranges: KeyRanges, queries: Runs, keys: Runs, layout: Layout) -> int:
    """Count the distances around the ring that any rank needs keys from.

    Its own distance, 0, is included.
    """
    ranks = queries.ranks
    rows, held = (
        [spans(layout, tokens, rank) for rank in range(ranks)]
        for tokens in (queries, keys)
    )
    whole = Tile(max(queries.length, 1), max(keys.length, 1))
    needed = MaskBlocks.of(ranges, Cut(rows, held, 0, whole)).needed
    distances = {
        (rank - source) % ranks
        for rank, sources in enumerate(needed)
        for source, is_needed in enumerate(sources)
        if is_needed
    }
    return len(distances | {0})
