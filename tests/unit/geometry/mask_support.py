"""Which parts of the scores a mask leaves, in layouts of consecutive tokens."""

import torch

from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks, spans
from cpcompile.geometry.mask_tiles import Tile

CPU = torch.device("cpu")


def places(layout, chunks):
    return [spans(layout, chunks, rank) for rank in range(chunks.ranks)]


def blocks_of(key_ranges, length, ranks=1, rank=0, **ids):
    ranges = KeyRanges.of(
        key_ranges,
        ids.get("q_segment_ids"),
        ids.get("kv_segment_ids"),
        length,
        length,
        CPU,
    )
    found = places(Layout.CONTIGUOUS, Runs.contiguous(length, ranks))
    return MaskBlocks.of(ranges, Cut(found, found, rank, Tile(512, 1 << 15)))


def band(low, high):
    low, high = torch.broadcast_tensors(torch.as_tensor(low), high)
    return torch.stack([low, high], -1).int().unsqueeze(0)
