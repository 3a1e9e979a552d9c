"""Graphs of programs that write into a key/value cache, and of single tokens."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard, zeros

from cpcompile.passes.model.sharding.gather_graph import gather_graph
from tests.golden.capture import capture, fake_mesh
from tests.golden.golden_text import assert_golden, bare_calls, lines_without, table

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


def captured(mesh, write, tokens, cache=None):
    cache = new_cache(mesh) if cache is None else cache
    x, position = torch.randn(1, tokens, 8), torch.arange(tokens)
    return capture(write, x, cache, position, mesh=mesh, strategy="auto")


def test_writes_to_a_cache(mesh):
    """One query, which every rank has, meets the keys of this rank.

    Tokens of a prompt are sharded, and so is attention; the new rows are gathered.
    Every rank writes all of a cache that is whole; for a token it reads its part.
    """
    captures = {
        "one token": captured(mesh, attend, 1),
        "a prompt": captured(mesh, attend, 4),
        "a whole cache": captured(mesh, attend, 1, torch.zeros(1, 2, LENGTH, 4)),
    }
    texts = {
        name: lines_without(bare_calls(x.text), "unflatten", "transpose", "return")
        for name, x in captures.items()
    }
    assert_golden(
        table(texts),
        """\
one token:
  cp_from_local = cp_from_local(l_keys_, (S(2),), (1, 2, 6, 4), (48, 24, 4, 1))
  index_copy_ = cp_write_rows(cp_from_local, q, 2, l_position_)
  cp_replicate = cp_replicate(q)
  split_kv_attention_default = cp.split_kv_attention(cp_replicate, cp_from_local,
      cp_from_local, sizes=[1, 6], spec='scale=0.5', group=GROUP)
a prompt:
  cp_shard = cp_shard(l_x_, 1)
  cp_from_local = cp_from_local(l_keys_, (S(2),), (1, 2, 6, 4), (48, 24, 4, 1))
  index_copy_ = cp_write_rows(cp_from_local, q, 2, l_position_)
  all_gather_attention_default = cp.all_gather_attention(q, cp_from_local,
      cp_from_local, sizes=[4, 6], spec='scale=0.5', group=GROUP)
a whole cache:
  index_copy_ = .index_copy_(l_keys_, 2, l_position_, q)
  cp_replicate = cp_replicate(q)
  cp_replicate_1 = cp_replicate(l_keys_)
  split_kv_attention_default = cp.split_kv_attention(cp_replicate, cp_replicate_1,
      cp_replicate_1, sizes=[1, 6], spec='scale=0.5', group=GROUP)""",
    )


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
    found = captured(mesh, by_assignment, 1)
    assert_golden(
        found.lines("cp_write_rows"),
        """\
setitem = cp_write_rows(cp_from_local, q, 2, l_position_)
setitem_1 = cp_write_rows(cp_from_local, getitem, 2, 4:5)""",
    )


def in_heads(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys[:, 0] = q[:, 0]
    return F.scaled_dot_product_attention(q, keys, keys)


def all_of_it(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.copy_(torch.cat([keys[:, :, 1:], q], 2))
    return F.scaled_dot_product_attention(q, keys, keys)


def test_unsharded_programs_write_back(mesh):
    """The caller's part of the cache gets what was written to the whole one."""
    x, position = torch.randn(1, 1, 8), torch.arange(1)
    arguments = (x, new_cache(mesh), position)
    found = capture(in_heads, *arguments, mesh=mesh, passes=(gather_graph,))
    text = found.lines("cp_gather", "write_back")
    assert_golden(
        bare_calls(text),
        """\
cp_gather = cp_gather(cp_from_local)
setitem = setitem(cp_gather, (:, 0), getitem)
scaled_dot_product_attention = scaled_dot_product_attention(q, cp_gather, cp_gather)
cp_write_back = cp_write_back(cp_from_local, cp_gather)""",
    )


def through_a_view(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, position, q)
    keys[:1].index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, keys, keys)


def beside_a_view(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    before = keys[:, :, :4]
    keys.index_copy_(2, position, q)
    return F.scaled_dot_product_attention(q, before, before)


REFUSED = {
    in_heads: ("l_keys_", "index_copy_"),
    all_of_it: ("l_keys_", "index_copy_"),
    through_a_view: ("a part of it, is written or read later",),
    beside_a_view: ("a part of it, is written or read later",),
}


@pytest.mark.parametrize("write", REFUSED)
def test_other_writes_and_views_are_refused(mesh, write):
    error = str(captured(mesh, write, 1).error)
    assert all(word in error for word in REFUSED[write])


def after_a_write(x, keys, position):
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    keys.index_copy_(2, position, q)
    seen = keys[:, :, :4]
    return F.scaled_dot_product_attention(q, seen, seen)


def test_views_after_a_write_are_fine(mesh):
    assert captured(mesh, after_a_write, 1).error is None


def test_rows_with_a_gradient_are_refused(mesh):
    with torch.enable_grad():
        x = torch.randn(1, 1, 8, requires_grad=True)
        position = torch.arange(1)
        error = capture(attend, x, new_cache(mesh), position, mesh=mesh).error
    assert "needed torch.no_grad()" in str(error)
