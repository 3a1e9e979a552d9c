"""Attention under a mask becomes an operator that takes integers per token."""

import torch
import torch.nn.functional as F

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden
from tests.golden.operands import QKV


def make_qkv(*shape):
    return (torch.randn(shape) for _ in range(3))


def test_under_a_mask(mesh):
    """Integers per token, and what no integers say as a tensor."""

    def masked(q, k, v, padding):
        row = torch.arange(16)
        window = (row[None] <= row[:, None]) & (row[None] > row[:, None] - 5)
        mask = window & padding[:, None, None].bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    padding = torch.ones(2, 16, dtype=torch.long)
    captured = capture(masked, *make_qkv(2, 4, 16, 8), padding, mesh=mesh, shard=QKV)
    (mask,) = captured.ctx.findings.masks.values()
    assert mask.text == "causal, window 5, key padding"
    of_pairs = [x for x in captured.text.splitlines() if x.endswith("16, 16]")]
    assert not of_pairs, "nothing of all pairs is left"
    assert_golden(
        captured.lines("cp_replicate = ", "cp_replicate_1 =", "= cp.ring"),
        """\
cp_replicate = cp_replicate(cp_constant)  # [1, 16, 2] R
cp_replicate_1 = cp_replicate(cp_constant_1)  # [1, 16] R
ring_attention_default = cp.ring_attention(cp_shard, cp_shard_1, cp_shard_2,
    [cp_replicate, cp_replicate_1, cp_replicate_2], sizes=[16, 16],
    spec='scale=0.353553 +key_ranges +q_segment_ids +kv_segment_ids', group=GROUP)""",
    )


def test_a_mask_of_constants(mesh):
    """The operator is given the name under which the compiler keeps it."""

    def masked(q, k, v):
        row = torch.arange(16)
        window = (row[None] <= row[:, None]) & (row[None] > row[:, None] - 5)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=window)

    captured = capture(masked, *make_qkv(2, 4, 16, 8), mesh=mesh, shard=QKV)
    assert_golden(
        captured.lines("cp_replicate = ", "cp_replicate_1 =", "= cp.ring"),
        """\
cp_replicate = cp_replicate(cp_constant)  # [1, 16, 2] R
ring_attention_default = cp.ring_attention(cp_shard, cp_shard_1, cp_shard_2,
    [cp_replicate], sizes=[16, 16],
    spec='scale=0.353553 mask_key=ae129d633b2f87ac +key_ranges', group=GROUP)""",
    )
