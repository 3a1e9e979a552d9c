"""Attention calls of any number of dimensions become calls on [B, H, S, D]."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.rewritten_calls import check_equal, rewrite

sdpa = F.scaled_dot_product_attention
S, T, D, E = 7, 5, 4, 3  # queries, keys, head dims of keys and of values

# q, k, v without their last two sizes -> batch, query heads and key heads of operators
ALIGNED = {
    "five dims": ((2, 3, 4), (2, 3, 4), (2, 3, 4), (6, 4, 4)),
    "six dims": ((2, 1, 3, 4), (2, 1, 3, 4), (2, 1, 3, 4), (6, 4, 4)),
    "five dims, one key head": ((2, 3, 4), (2, 3, 1), (2, 3, 1), (6, 4, 1)),
    "five dims, one frame of keys": ((2, 3, 4), (2, 1, 4), (2, 1, 4), (6, 4, 4)),
    "five and four dims": ((2, 3, 4), (3, 4), (3, 4), (6, 4, 4)),
    "one batch of keys": ((2, 4), (1, 4), (1, 4), (2, 4, 4)),
    "one batch of values": ((2, 4), (2, 4), (1, 4), (2, 4, 4)),
    "one batch of queries": ((1, 4), (2, 4), (2, 4), (2, 4, 4)),
    "one head of queries": ((2, 1), (2, 4), (2, 4), (2, 4, 4)),
    "one head of values": ((2, 4), (2, 4), (2, 1), (2, 4, 4)),
    "four and three dims": ((2, 4), (4,), (4,), (2, 4, 4)),
    "three dims, one batch of keys": ((4,), (1,), (1,), (1, 4, 1)),
    "three dims, one batch of queries": ((1,), (4,), (4,), (1, 4, 4)),
    "two dims": ((), (), (), (1, 1, 1)),
    "three and two dims": ((4,), (), (), (1, 4, 1)),
}

KEPT = {
    "four dims": ((2, 4), (2, 4), (2, 4)),
    "one key head": ((2, 4), (2, 1), (2, 1)),
    "three dims": ((4,), (4,), (4,)),
    "one of all": ((1, 1), (1, 1), (1, 1)),
}


def inputs_of(q, k, v):
    torch.manual_seed(0)
    shapes = ((*q, S, D), (*k, T, D), (*v, T, E))
    return [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes]


def attend(q, k, v):
    return sdpa(q, k, v, is_causal=True, scale=0.7) * 2.0


@pytest.mark.parametrize("case", ALIGNED)
def test_shapes_that_are_aligned(case):
    *leading, (batch, heads, kv_heads) = ALIGNED[case]
    inputs = inputs_of(*leading)
    got = rewrite(attend, *inputs)
    assert got.counts["align_operands"] == 1
    (call,) = got.calls
    assert call.unsupported is None
    assert call.q_shape == (batch, heads, S, D)
    assert call.k_shape[1:] == (call.k_shape[1], T, D)
    # What is expanded only to be aligned is folded again, if both k and v are.
    assert call.k_shape[1] == kv_heads
    assert call.node.meta["example_value"].shape == (batch, heads, S, E)
    check_equal(got, attend, *inputs)


@pytest.mark.parametrize("case", KEPT)
def test_shapes_that_are_kept(case):
    inputs = inputs_of(*KEPT[case])
    got = rewrite(attend, *inputs)
    assert got.counts["align_operands"] == 0
    assert got.texts["align_operands"] == got.texts[""]
    check_equal(got, attend, *inputs)


def test_grouped_heads_are_kept():
    def grouped(q, k, v):
        return sdpa(q, k, v, enable_gqa=True)

    inputs = inputs_of((2, 4), (2, 2), (2, 2))
    assert rewrite(grouped, *inputs).counts["align_operands"] == 0


def test_grouped_heads_in_five_dims():
    def grouped(q, k, v):
        return sdpa(q, k, v, enable_gqa=True)

    inputs = inputs_of((2, 3, 4), (2, 3, 2), (2, 3, 2))
    got = rewrite(grouped, *inputs)
    assert got.counts["align_operands"] == 1
    assert (got.calls[0].q_shape[1], got.calls[0].k_shape[1]) == (4, 2)
    check_equal(got, grouped, *inputs)


MASKS = {
    "pairs": (S, T),
    "heads": (4, S, T),
    "frames": (3, 1, S, T),
    "all": (2, 3, 4, S, T),
    "one": (1, 1, 1, S, T),
    "keys": (2, 1, 1, 1, T),
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks_are_aligned_too(mask):
    def masked(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask)

    inputs = inputs_of((2, 3, 4), (2, 3, 4), (2, 3, 4))
    inputs.append(torch.randn(MASKS[mask], dtype=torch.float64, requires_grad=True))
    got = rewrite(masked, *inputs)
    assert got.counts["align_operands"] == 1
    (call,) = got.calls
    shape = call.mask.meta["example_value"].shape
    torch.broadcast_shapes(shape, (6, 4, S, T))  # raises if it does not fit
    assert len(shape) <= 4
    check_equal(got, masked, *inputs)


@pytest.mark.parametrize("shape", [(2, 1, S, T), (1, 4, S, T), (1, 1, 1, S, T)])
def test_a_mask_does_not_broadcast_the_operands(shape):
    """torch adds it in place, and says so when the call runs."""

    def masked(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=mask)

    inputs = inputs_of((1, 1), (1, 1), (1, 1))
    inputs.append(torch.randn(shape, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        rewrite(masked, *inputs)


def test_the_graph_before_and_after(mesh):
    inputs = [torch.randn(2, 3, 4, 16, 8) for _ in "qkv"]
    captured = capture(
        lambda q, k, v: sdpa(q, k, v, is_causal=True),
        *inputs,
        mesh=mesh,
        shard={"q": 3, "k": 3, "v": 3},
        until="insert_attention",
    )
    step = captured["align_operands"]
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
+ flatten = flatten(l_q_, 0, 1)
+ flatten_1 = flatten(l_k_, 0, 1)
+ flatten_2 = flatten(l_v_, 0, 1)
~ scaled_dot_product_attention: l_q_ -> flatten, l_k_ -> flatten_1, l_v_ -> flatten_2
+ unflatten = unflatten(scaled_dot_product_attention, 0, (2, 3))
~ return: scaled_dot_product_attention -> unflatten""",
    )
    assert captured["insert_attention"].rewrites == 1


def test_calls_that_are_split_on_the_batch_stay(mesh_2d):
    """The twin: they are right as they are, though one batch of keys is broadcast."""
    sharded = [
        distribute_tensor(torch.randn(n, 4, 16, 8), mesh_2d, [Replicate(), placement])
        for n, placement in ((4, Shard(0)), (1, Replicate()), (1, Replicate()))
    ]
    captured = capture(lambda q, k, v: sdpa(q, k, v), *sharded)
    assert captured.ctx.findings.calls[0].already_local is not None
    step = captured["align_operands"]
    assert step.rewrites == 0 and not step.changed
