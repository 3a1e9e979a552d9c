"""Graphs of programs that write into a key/value cache, and of single tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, zeros

from tests.golden.capture import capture, fake_mesh, localised
from tests.golden.golden_text import assert_golden, bare_calls, lines_with, table

LENGTH = 6


@pytest.fixture
def mesh():
    """Rank 1 of 2."""
    with fake_mesh(2) as mesh, torch.no_grad():
        yield mesh


def new_cache(mesh):
    shape = (1, 2, LENGTH, 4)
    return zeros(*shape, device_mesh=mesh, placements=[Shard(2)])


def attend(x, keys, position):
    """[B, S, C]; the cache is of keys and of values."""
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, keys, keys).transpose(1, 2)


def local(mesh, write, tokens, cache=None):
    cache = new_cache(mesh) if cache is None else cache
    x, position = torch.randn(1, tokens, 8), torch.arange(tokens)
    how = {"mesh": mesh, "strategy": "auto" if tokens == 1 else "all_gather"}
    return localised(write, x, cache, position, **how)


def test_writes_to_a_cache(mesh):
    """One query, which every rank has, meets the keys of this rank.

    Tokens of a prompt are sharded, and so is attention; the new rows are gathered.
    """
    words = ("gather_into_tensor(", "index_put(", "_attention_1 =", "copy_(")
    texts = {"one token": local(mesh, attend, 1), "a prompt": local(mesh, attend, 4)}
    assert_golden(
        table({name: lines_with(x.text, *words) for name, x in texts.items()}),
        """\
one token:
  index_put = aten.index_put(arg1_1, [None, None, where_2], where_3)
  split_kv_attention_1 = cp.split_kv_attention(transpose_2, view_4, view_4,
      sizes=[1, 6], spec='scale=0.5', group='0')
  copy__1 = aten.copy_(arg1_1, view_4)
a prompt:
  all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(clone_1,
      group_size=2, group_name='0')
  index_put = aten.index_put(arg2_1, [None, None, where_2], where_3)
  all_gather_attention_1 = cp.all_gather_attention(transpose_2, view_5, view_5,
      sizes=[4, 6], spec='scale=0.5', group='0')
  copy__1 = aten.copy_(arg2_1, view_5)
  all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor(clone_2,
      group_size=2, group_name='0')""",
    )


def test_a_whole_cache_is_written_everywhere_and_read_in_parts(mesh):
    found = local(mesh, attend, 1, torch.zeros(1, 2, LENGTH, 4))
    assert "split_kv_attention" in found.text and "all_gather" not in found.text


def counted(x, keys, count):
    """As a cache of transformers, whose length is raised after its use."""
    seen = torch.arange(x.shape[1]) + count
    mask = torch.arange(LENGTH) <= seen[:, None]
    count.add_(x.shape[1])
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, seen, q)
    return F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask)


def test_a_mask_is_read_before_what_it_reads_is_written(mesh):
    x, count = torch.randn(1, 4, 8), torch.tensor(1)
    found = capture(counted, x, new_cache(mesh), count, mesh=mesh)
    assert "+key_ranges" in found.lines("ring_attention")
    names = [line.split(" = ")[0] for line in bare_calls(found.text).splitlines()]
    assert names.index("_to_copy_default") < names.index("add_")


def test_a_mask_of_what_was_written_before_is_a_bias(mesh):
    def late(x, keys, count):
        count.add_(1)
        return counted(x, keys, count)

    x, count = torch.randn(1, 4, 8), torch.tensor(1)
    found = capture(late, x, new_cache(mesh), count, mesh=mesh)
    assert found.error is None
    assert "+bias" in found.lines("ring_attention", "split_kv_attention")
    names = [line.split(" = ")[0] for line in bare_calls(found.text).splitlines()]
    assert names.index("add_") < names.index("mask")


def by_assignment(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys[:, :, position] = q
    keys[..., 4:5, :] = q[:, :, :1]
    return F.scaled_dot_product_attention(q, keys, keys)


def test_assignments(mesh):
    """Where the place is known, the rank that has it copies; nothing is sent."""
    assert_golden(
        local(mesh, by_assignment, 1).lines("index_put(", "moved_tokens("),
        """\
index_put_1 = aten.index_put(arg1_1, [None, None, where_2], where_3)
moved_tokens = cp.moved_tokens([view_5, view_6], dim=2, lengths=[6, 1],
    layouts='contiguous whole contiguous', pieces=[0, 0, 6, 0, 1, 1, 1, 0, 1, 4, 1, 1],
    length=6, fill=0, group='0')""",
    )


def in_heads(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys[:, 0] = q[:, 0]
    return F.scaled_dot_product_attention(q, keys, keys)


def all_of_it(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.copy_(torch.cat([keys[:, :, 1:], q], 2))
    return F.scaled_dot_product_attention(q, keys, keys)


def through_a_view(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, position, q)
    keys[:1].index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, keys, keys)


def beside_a_view(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    before = keys[:, :, :5]
    keys.index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, before, before)


def after_a_write(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, position, q)
    seen = keys[:, :, :5]
    return F.scaled_dot_product_attention(q, seen, seen)


@pytest.mark.parametrize(
    "write", [in_heads, all_of_it, through_a_view, beside_a_view, after_a_write]
)
def test_other_writes_and_views(mesh, write):
    """The caller's part of the cache is written once; no rank has all of it."""
    text = local(mesh, write, 1).text
    assert text.count("aten.copy_(") == 1
    assert "split_kv_attention" in text and "all_gather" not in text
