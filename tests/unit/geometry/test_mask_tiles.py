"""Parts are few and have no mask where kernels need none; Note [Blocks of a mask]."""

import itertools

import pytest
import torch

from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks
from cpcompile.geometry.mask_tiles import Tile
from tests.unit.geometry.mask_support import CPU, band, blocks_of, places


def sides(blocks, source=0):
    """Rows and keys of parts, and how they are hidden."""
    kinds = {(False, False): "whole", (True, False): "masked", (False, True): "causal"}
    return [
        (part.row, part.rows, part.key, part.keys, kinds[part.masked, part.triangular])
        for part in blocks.of_source(source)
    ]


def test_a_causal_mask_is_one_triangle():
    i = torch.arange(8192)
    blocks = blocks_of(band(0, i + 1), 8192)
    assert sides(blocks) == [(0, 8192, 0, 8192, "causal")]
    assert blocks.pairs == 8192 * 8193 // 2


def test_a_causal_mask_with_a_bias_computes_half():
    """Its parts are cut into tiles, which plain math and a bias need."""
    ranges = KeyRanges.of(band(0, torch.arange(8192) + 1), None, None, 8192, 8192, CPU)
    found = places(Layout.CONTIGUOUS, Runs.contiguous(8192, 1))
    blocks = MaskBlocks.of(ranges, Cut(found, found, 0, Tile(512, 1 << 15), True))
    assert blocks.pairs == sum(512 * (512 * k) for k in range(1, 17))
    masked = sum(x.rows * x.keys for x in blocks.of_source(0) if x.masked)
    # All rows of a tile see the keys up to its first row, of the first tile too few.
    assert masked == 15 * 512 * 511 + 512 * 512


UNEVEN = torch.tensor([0, 700, 1900, 2048, 3100, 4096])  # where documents begin


def uneven_ids():
    at = torch.arange(4096)
    return torch.bucketize(at, UNEVEN, right=True).unsqueeze(0)


@pytest.mark.parametrize("kind", ["causal", "whole"])
def test_a_document_is_one_triangle_or_one_part(kind):
    """Wherever it begins: no tile has a mask."""
    ids = uneven_ids()
    seen = band(0, torch.arange(4096) + 1) if kind == "causal" else None
    blocks = blocks_of(seen, 4096, q_segment_ids=ids, kv_segment_ids=ids)
    pairs = itertools.pairwise(UNEVEN.tolist())
    assert sides(blocks) == [(a, b - a, a, b - a, kind) for a, b in pairs]


def test_a_causal_document_of_two_ranks_is_a_rectangle_and_a_triangle():
    """Rows from 2100 on of a document that begins at 1000."""
    ids = (torch.arange(4200) >= 1000).unsqueeze(0)
    causal = band(0, torch.arange(4200) + 1)
    how = {"ranks": 2, "rank": 1, "q_segment_ids": ids, "kv_segment_ids": ids}
    blocks = blocks_of(causal, 4200, **how)
    assert sides(blocks, 0) == [(0, 2100, 1000, 1100, "whole")]
    assert sides(blocks, 1) == [(0, 2100, 0, 2100, "causal")]


def test_keys_without_rows_leave_a_rectangle_and_a_triangle():
    """As of queries that continue keys of a cache."""
    ranges = KeyRanges.of(band(0, torch.arange(64) + 1001), None, None, 64, 1064, CPU)
    rows, keys = (places(Layout.CONTIGUOUS, Runs.contiguous(n, 1)) for n in (64, 1064))
    blocks = MaskBlocks.of(ranges, Cut(rows, keys, 0, Tile(512, 1 << 15)))
    expected = [(0, 64, 0, 1000, "whole"), (0, 64, 1000, 64, "causal")]
    assert sides(blocks) == expected


def test_short_documents_share_a_mask():
    """A tile in which several begin is not cut, and its calls stay as many."""
    ids = (torch.arange(1024) // 100).unsqueeze(0)
    causal = band(0, torch.arange(1024) + 1)
    blocks = blocks_of(causal, 1024, q_segment_ids=ids, kv_segment_ids=ids)
    assert {x[-1] for x in sides(blocks)} == {"masked"}
    assert len(sides(blocks)) <= 4


@pytest.mark.parametrize("length", [64, 4096])
def test_what_all_rows_see_is_one_part(length):
    """The whole chunk of another rank, without a mask and whatever the tiles."""
    blocks = blocks_of(band(0, torch.arange(length) + 1), length, ranks=2, rank=1)
    (part,) = blocks.of_source(0)
    assert (part.rows, part.keys, part.masked) == (length // 2, length // 2, False)


def test_only_adjacent_tiles_are_one_part():
    """Rows 512 to 1023 see nothing."""
    i = torch.arange(1536)
    blocks = blocks_of(band(0, torch.where(i // 512 == 1, 0, 1536)), 1536)
    found = [(part.row, part.rows, part.keys) for part in blocks.of_source(0)]
    assert found == [(0, 512, 1536), (1024, 512, 1536)]
