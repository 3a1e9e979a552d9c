"""What is computed under a mask covers what is visible, once, and little else."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.geometry import mask_tiles
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks, spans
from cpcompile.geometry.mask_tiles import Tile
from cpcompile.ops.step.row_mask import RowMask
from tests.unit.geometry.mask_support import CPU, band, blocks_of, places


def key_ranges_of(kind, batch, q_len, kv_len, generator):
    """int32 [batch, q_len, 2] of some kind; may be outside of the keys, or reversed."""
    i = torch.arange(q_len) + kv_len - q_len
    width = torch.randint(1, 9, (batch, 1), generator=generator)
    if kind == "random":
        shape = (batch, q_len, 2)
        return torch.randint(-3, kv_len + 4, shape, generator=generator).int()
    low, high = {
        "causal": (0 * width, i + 1 + 0 * width),
        "window": (i + 1 - width, i + 1 + 0 * width),
        "both sides": (i - width, i + width),
        "chunked": (i // width * width, i + 1 + 0 * width),
        "prefix": (0 * width, torch.maximum(i + 1, width)),
    }[kind]
    return torch.stack(torch.broadcast_tensors(low, high), -1).int()


def ids_of(kind, batch, q_len, kv_len, generator):
    """q_segment_ids [1 or batch, q_len] and kv_segment_ids [batch, kv_len]."""
    if kind == "documents":
        size = torch.randint(1, 9, (batch, 1), generator=generator)
        return torch.arange(q_len) // size, torch.arange(kv_len) // size
    if kind == "padding":
        start = torch.randint(0, kv_len + 1, (batch, 1), generator=generator)
        return torch.zeros(1, q_len).int(), -(torch.arange(kv_len) < start).int()
    if kind == "hole":
        hole = torch.randint(0, kv_len + 1, (batch, 1), generator=generator)
        return torch.zeros(1, q_len).int(), -(torch.arange(kv_len) == hole).int()
    few = torch.randint(0, 3, (batch, q_len), generator=generator)
    return few, torch.randint(-1, 3, (batch, kv_len), generator=generator)


KINDS = ("random", "causal", "window", "both sides", "chunked", "prefix")
ID_KINDS = ("documents", "padding", "hole", "random")


@st.composite
def masks(draw):
    """key_ranges, q_segment_ids, kv_segment_ids, q_len, kv_len of a mask."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    batch, q_len = draw(st.integers(1, 2)), draw(st.integers(0, 40))
    kv_len = draw(st.just(q_len) | st.integers(0, 40))
    sizes = batch, q_len, kv_len, generator
    kind = draw(st.sampled_from(KINDS) | st.none())
    key_ranges = None if kind is None else key_ranges_of(kind, *sizes)
    id_kind = draw(st.sampled_from(ID_KINDS) | st.none())
    q_segment_ids, kv_segment_ids = (
        (None, None) if id_kind is None else ids_of(id_kind, *sizes)
    )
    return key_ranges, q_segment_ids, kv_segment_ids, q_len, kv_len


def dense(key_ranges, q_segment_ids, kv_segment_ids, q_len, kv_len):
    """bool [B or 1, q_len, kv_len]."""
    seen = torch.ones(1, q_len, kv_len, dtype=torch.bool)
    if key_ranges is not None:
        key = torch.arange(kv_len)
        seen = seen & (key >= key_ranges[..., :1]) & (key < key_ranges[..., 1:])
    if q_segment_ids is not None:
        seen = seen & (q_segment_ids.unsqueeze(-1) == kv_segment_ids.unsqueeze(1))
    return seen


def positions(found):
    return [x for span in found for x in range(span.position, span.stop)]


@settings(max_examples=300)
@given(
    masks(),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from([Tile(3, 4), Tile(8, 5), Tile(64, 64)]),
    st.booleans(),
)
def test_parts_cover_what_is_visible_once(fields, ranks, zigzag, tile, cut_all):
    """And what they compute is visible exactly where their masks say so."""
    _, q_segment_ids, kv_segment_ids, q_len, kv_len = fields
    layout = Layout.ZIGZAG if zigzag and q_len == kv_len else Layout.CONTIGUOUS
    rows, keys = (places(layout, Runs.contiguous(n, ranks)) for n in (q_len, kv_len))
    ranges = KeyRanges.of(*fields, CPU)
    visible = dense(*fields)
    for rank in range(ranks):
        with mock.patch.object(mask_tiles, "WORTH_A_CALL_KEYS", 2):
            blocks = MaskBlocks.of(ranges, Cut(rows, keys, rank, tile, cut_all))
        own = torch.tensor(positions(rows[rank]), dtype=torch.int64)
        ids = (
            (q_segment_ids.expand(len(visible), -1)[:, own], kv_segment_ids)
            if blocks.has_holes
            else 2 * (None,)
        )
        own_ranges = ranges.rows(own)
        mask = RowMask(own_ranges.lower, own_ranges.upper, *ids, None)
        assert blocks.has_holes or torch.equal(
            visible[:, own].any(2),
            (mask.lower < mask.upper).expand(len(visible), -1),
        )
        for source in range(ranks):
            held = torch.tensor(positions(keys[source]), dtype=torch.int64)
            seen = visible[:, own][:, :, held]
            computed = torch.zeros(seen.shape[1:], dtype=torch.int64)
            assert blocks.sees(source) == blocks.needed[rank][source]
            for part in blocks.of_source(source):
                at = (
                    slice(part.row, part.row + part.rows),
                    slice(part.key, part.key + part.keys),
                )
                triangle = torch.ones(part.rows, part.keys, dtype=torch.int64)
                if part.triangular:
                    assert part.rows == part.keys and not cut_all
                    triangle.tril_()
                computed[at] += triangle
                assert part.rows and part.keys
                assert held[part.key : part.key + part.keys].tolist() == list(
                    range(part.position, part.position + part.keys)
                )
                if part.masked or cut_all:
                    assert part.rows <= tile.rows and part.keys <= tile.keys
                added = mask.of_block(part, torch.float32)
                assert (added is None) is not part.masked
                expected = seen[:, *at]
                got = triangle[None] > 0 if added is None else added[:, 0] == 0
                assert torch.equal(got.expand_as(expected), expected)
            assert computed.max() <= 1 if computed.numel() else True
            assert (computed > 0)[seen.any(0)].all()


@given(masks(), st.integers(1, 5), st.booleans())
def test_every_rank_knows_who_sees_whom(fields, ranks, zigzag):
    """Exactly for key ranges, and for ids without holes."""
    *_, q_len, kv_len = fields
    layout = Layout.ZIGZAG if zigzag and q_len == kv_len else Layout.CONTIGUOUS
    rows, keys = (places(layout, Runs.contiguous(n, ranks)) for n in (q_len, kv_len))
    ranges, visible = KeyRanges.of(*fields, CPU), dense(*fields)
    tables = [
        MaskBlocks.of(ranges, Cut(rows, keys, rank, Tile(4, 64)))
        for rank in range(ranks)
    ]
    assert len({blocks.needed for blocks in tables}) == 1
    for rank in range(ranks):
        for source in range(ranks):
            block = visible[:, positions(rows[rank])][:, :, positions(keys[source])]
            needed = tables[0].needed[rank][source]
            assert needed == block.any() or (needed and tables[0].has_holes)


@pytest.mark.parametrize("window", [16, 256, 1000])
def test_a_window_costs_its_width(window):
    """Each tile of rows meets its own keys, and those of the window before it."""
    length, i = 8192, torch.arange(8192)
    blocks = blocks_of(band(i + 1 - window, i + 1), length)
    assert blocks.pairs <= length * (window + 512)
    assert blocks.pairs >= length * window - window * window


def test_ranges_that_decrease_are_found():
    i = torch.arange(64)
    assert blocks_of(band(i - 5, i + 1), 64).ordered
    assert not blocks_of(band(0, 64 - i), 64).ordered
    assert not blocks_of(band((i % 2).clamp(max=i), i + 1), 64).ordered


def test_documents_are_ranges():
    """No ids are compared, and a document computes nothing of another one."""
    ids = (torch.arange(4096) // 1024).unsqueeze(0)
    blocks = blocks_of(None, 4096, q_segment_ids=ids, kv_segment_ids=ids)
    assert not blocks.has_holes
    assert blocks.pairs == 4 * 1024 * 1024
    assert not any(part.masked for part in blocks.of_source(0))
    ids = (torch.arange(64) % 2).unsqueeze(0)
    assert blocks_of(None, 64, q_segment_ids=ids, kv_segment_ids=ids).has_holes


@given(st.integers(1, 1 << 12), st.integers(1, 1 << 24))
def test_a_tile_keeps_its_bound(copies, elements):
    tile = Tile.of(copies, elements)
    assert 1 <= tile.rows <= 256 and tile.keys >= 1
    assert tile.rows * tile.keys * copies <= max(elements, copies)


@given(st.integers(0, 50), st.integers(1, 6), st.sampled_from(["contiguous", "zigzag"]))
def test_spans_are_the_layout(length, ranks, layout):
    tokens = TokenLayout.of(Layout(layout), length, ranks)
    for rank in range(ranks):
        found = spans(Layout(layout), Runs.contiguous(length, ranks), rank)
        assert positions(found) == tokens.positions(rank).tolist()
        assert all(span.count for span in found)
        held = [i for x in found for i in range(x.place, x.place + x.count)]
        assert held == list(range(tokens.count(rank)))
