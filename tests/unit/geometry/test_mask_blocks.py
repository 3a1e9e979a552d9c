"""What is computed under a mask covers what is visible, once, and little else."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpcompile.geometry import mask_blocks, mask_cache, mask_tiles
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs, TokenLayout
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks, spans
from cpcompile.geometry.mask_cache import cached_blocks, put_mask
from cpcompile.geometry.mask_tiles import Tile
from cpcompile.ops.step.row_mask import RowMask
from tests.support.attention_calls import attention
from tests.unit.ops.operands import make_operands


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


def test_ranges_in_order_and_documents():
    i = torch.arange(64)
    assert blocks_of(band(i - 5, i + 1), 64).ordered
    assert not blocks_of(band(0, 64 - i), 64).ordered
    assert not blocks_of(band((i % 2).clamp(max=i), i + 1), 64).ordered
    # No ids are compared, and a document computes nothing of another one.
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
    # Its parts are cut into tiles, which plain math and a bias need.
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


def test_a_rectangle_and_a_triangle():
    # Rows from 2100 on of a document that begins at 1000.
    ids = (torch.arange(4200) >= 1000).unsqueeze(0)
    causal = band(0, torch.arange(4200) + 1)
    how = {"ranks": 2, "rank": 1, "q_segment_ids": ids, "kv_segment_ids": ids}
    blocks = blocks_of(causal, 4200, **how)
    assert sides(blocks, 0) == [(0, 2100, 1000, 1100, "whole")]
    assert sides(blocks, 1) == [(0, 2100, 0, 2100, "causal")]
    # As of queries that continue keys of a cache.
    ranges = KeyRanges.of(band(0, torch.arange(64) + 1001), None, None, 64, 1064, CPU)
    rows, keys = (places(Layout.CONTIGUOUS, Runs.contiguous(n, 1)) for n in (64, 1064))
    blocks = MaskBlocks.of(ranges, Cut(rows, keys, 0, Tile(512, 1 << 15)))
    expected = [(0, 64, 0, 1000, "whole"), (0, 64, 1000, 64, "causal")]
    assert sides(blocks) == expected


def test_which_tiles_are_one_part():
    # A tile in which several begin is not cut, and its calls stay as many.
    ids = (torch.arange(1024) // 100).unsqueeze(0)
    causal = band(0, torch.arange(1024) + 1)
    blocks = blocks_of(causal, 1024, q_segment_ids=ids, kv_segment_ids=ids)
    assert {x[-1] for x in sides(blocks)} == {"masked"}
    assert len(sides(blocks)) <= 4
    # Rows 512 to 1023 see nothing.
    i = torch.arange(1536)
    blocks = blocks_of(band(0, torch.where(i // 512 == 1, 0, 1536)), 1536)
    found = [(part.row, part.rows, part.keys) for part in blocks.of_source(0)]
    assert found == [(0, 512, 1536), (1024, 512, 1536)]


@pytest.mark.parametrize("length", [64, 4096])
def test_what_all_rows_see_is_one_part(length):
    """The whole chunk of another rank, without a mask and whatever the tiles."""
    blocks = blocks_of(band(0, torch.arange(length) + 1), length, ranks=2, rank=1)
    (part,) = blocks.of_source(0)
    assert (part.rows, part.keys, part.masked) == (length // 2, length // 2, False)


S = 24


def ranges_of_window(width=5, length=S):
    row = torch.arange(length)
    return torch.stack([(row + 1 - width).clamp(min=0), row + 1], -1).int()[None]


def ids_of_documents(size=7, length=S):
    return (torch.arange(length) // size).int()[None]


def test_equal_masks_have_one_name():
    name = put_mask((ranges_of_window(), None, None), S, S)
    assert name == put_mask((ranges_of_window(), None, None), S, S)
    ids = ids_of_documents()
    others = [
        put_mask((ranges_of_window(6), None, None), S, S),
        put_mask((ranges_of_window().long(), None, None), S, S),
        put_mask((ranges_of_window(length=S - 1), None, None), S - 1, S),
        put_mask((ranges_of_window(), ids, ids), S, S),
        put_mask((None, ids, ids), S, S),
        put_mask((None, ids, ids_of_documents(6)), S, S),
        put_mask((None, None, None), S, S),
        put_mask((None, None, None), S, S + 1),
    ]
    assert len({name, *others}) == 1 + len(others)


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
@pytest.mark.parametrize("rank", range(3))
def test_parts_are_those_of_a_look(layout, rank):
    ids = ids_of_documents()
    name = put_mask((ranges_of_window(), ids, ids), S, S)
    rows = tuple(spans(layout, Runs.contiguous(S, 3), each) for each in range(3))
    cut = Cut(rows, rows, rank, Tile(4, 8))
    ranges = KeyRanges.of(ranges_of_window(), ids, ids, S, S, torch.device("cpu"))
    assert cached_blocks(name, cut) == MaskBlocks.of(ranges, cut)


def attend(known):
    """out and its gradients, and how often the mask was looked at."""
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in make_operands(torch.float32, 2, S, S)]
    looks = mock.Mock(side_effect=mask_blocks.seen_runs)
    with mock.patch.object(mask_blocks, "seen_runs", looks):
        results = []
        for _ in range(2):
            out, _ = attention("local")(
                *leaves, 0.3, key_ranges=ranges_of_window(3), mask_key=known
            )
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append((out.detach(), *grads))
    return results, looks.call_count


def test_a_known_mask_is_looked_at_once(monkeypatch):
    mask_cache._blocks.cache_clear()
    known = put_mask((ranges_of_window(3), None, None), S, S)
    (first, second), looks = attend(known)
    (expected, _), each_time = attend("of_no_mask")
    assert (looks, each_time) == (1, 4)
    for x, y, z in zip(first, second, expected, strict=True):
        assert torch.equal(x, z) and torch.equal(y, z)
    monkeypatch.setattr(mask_cache, "_CACHED", 2)
    monkeypatch.setattr(mask_cache, "_ranges", type(mask_cache._ranges)())
    first, second = (put_mask((ranges_of_window(n), None, None), S, S) for n in (8, 9))
    put_mask((ranges_of_window(8), None, None), S, S)  # used again
    put_mask((ranges_of_window(10), None, None), S, S)
    cut = ((spans(Layout.CONTIGUOUS, Runs.contiguous(S, 1), 0),),) * 2
    assert cached_blocks(second, Cut(*cut, 0, Tile(4, 4))) is None
    assert cached_blocks(first, Cut(*cut, 0, Tile(4, 4))) is not None
