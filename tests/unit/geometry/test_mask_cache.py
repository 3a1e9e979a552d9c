"""Names of masks whose integers the compiler knows."""

from unittest import mock

import pytest
import torch

from cpcompile.geometry import mask_blocks, mask_cache
from cpcompile.geometry.key_ranges import KeyRanges
from cpcompile.geometry.layout import Layout, Runs
from cpcompile.geometry.mask_blocks import Cut, MaskBlocks, spans
from cpcompile.geometry.mask_cache import cached_blocks, put_mask
from cpcompile.geometry.mask_tiles import Tile
from tests.support.attention_calls import attention
from tests.unit.ops.operands import make_operands

S = 24


def window(width=5, length=S):
    row = torch.arange(length)
    return torch.stack([(row + 1 - width).clamp(min=0), row + 1], -1).int()[None]


def documents(size=7, length=S):
    return (torch.arange(length) // size).int()[None]


def test_equal_masks_have_one_name():
    name = put_mask((window(), None, None), S, S)
    assert name == put_mask((window(), None, None), S, S)
    ids = documents()
    others = [
        put_mask((window(6), None, None), S, S),
        put_mask((window().long(), None, None), S, S),
        put_mask((window(length=S - 1), None, None), S - 1, S),
        put_mask((window(), ids, ids), S, S),
        put_mask((None, ids, ids), S, S),
        put_mask((None, ids, documents(6)), S, S),
        put_mask((None, None, None), S, S),
        put_mask((None, None, None), S, S + 1),
    ]
    assert len({name, *others}) == 1 + len(others)


@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG], ids=str)
@pytest.mark.parametrize("rank", range(3))
def test_parts_are_those_of_a_look(layout, rank):
    ids = documents()
    name = put_mask((window(), ids, ids), S, S)
    rows = tuple(spans(layout, Runs.contiguous(S, 3), each) for each in range(3))
    cut = Cut(rows, rows, rank, Tile(4, 8))
    ranges = KeyRanges.of(window(), ids, ids, S, S, torch.device("cpu"))
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
                *leaves, 0.3, key_ranges=window(3), mask_key=known
            )
            grads = torch.autograd.grad(out.square().sum(), leaves)
            results.append((out.detach(), *grads))
    return results, looks.call_count


def test_a_known_mask_is_looked_at_once():
    mask_cache._blocks.cache_clear()
    known = put_mask((window(3), None, None), S, S)
    (first, second), looks = attend(known)
    (expected, _), each_time = attend("of_no_mask")
    assert (looks, each_time) == (1, 4)
    for x, y, z in zip(first, second, expected, strict=True):
        assert torch.equal(x, z) and torch.equal(y, z)


def test_so_many_are_kept(monkeypatch):
    monkeypatch.setattr(mask_cache, "_CACHED", 2)
    monkeypatch.setattr(mask_cache, "_ranges", type(mask_cache._ranges)())
    first, second = (put_mask((window(n), None, None), S, S) for n in (8, 9))
    put_mask((window(8), None, None), S, S)  # used again
    put_mask((window(10), None, None), S, S)
    cut = ((spans(Layout.CONTIGUOUS, Runs.contiguous(S, 1), 0),),) * 2
    assert cached_blocks(second, Cut(*cut, 0, Tile(4, 4))) is None
    assert cached_blocks(first, Cut(*cut, 0, Tile(4, 4))) is not None
